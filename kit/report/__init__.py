"""Reports as one self-contained HTML file with inline SVG curves, without torch and pandas."""
