"""The page of a run: gathered values (`log`, `events`, `texts`), figures (`figures`), and their HTML (`document`).

Only the HTML knows of a browser, and only the figures of plotly. What is gathered from files may be damaged or
missing: a page without it is made all the same.
"""
