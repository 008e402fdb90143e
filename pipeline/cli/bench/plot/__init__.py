"""Charts of benchmark results, as SVG.

scales.py   maps values to positions, and chooses the ticks of an axis
panels.py   line panels and bar panels
svg.py      SVG elements, and the colours of both themes
chart.py    a chart: title, legend, rows of panels
results.py  `pipeline bench --plot`: the chart of one or several results
"""
