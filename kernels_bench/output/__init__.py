"""Journals into tables; tables merged, checked, compared, exported."""
