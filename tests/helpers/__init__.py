"""Models, jobs and plans that tests share; no tests. Packages' tests may import them, too."""
