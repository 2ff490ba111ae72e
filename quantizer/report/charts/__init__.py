"""Pictures of a report, drawn as SVG."""
