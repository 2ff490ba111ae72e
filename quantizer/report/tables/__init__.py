"""Tables and sentences of a report, for terminal and page."""
