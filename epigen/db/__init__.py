"""The tuning database: problems, records, files, and which record a problem is given."""
