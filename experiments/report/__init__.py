"""From records to the report: which records, which figures, which words."""
