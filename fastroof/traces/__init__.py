"""Traces and drawn workloads: requests with their arrival times, lengths and sessions."""
