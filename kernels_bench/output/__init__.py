"""What comes of a run: journals into tables, and tables merged, validated, compared and exported."""
