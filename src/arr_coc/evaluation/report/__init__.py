"""From records to a report: statistics, a summary of plain values, sections, and the files."""
