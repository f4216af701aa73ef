"""Reports: one self-contained HTML file, curves as inline SVG. No torch, no pandas, nothing loaded from elsewhere."""
