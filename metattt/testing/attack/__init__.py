"""An attack on everything that the commands read: damaged files, malicious files, bad commands; a table of what came of
them. `python -m metattt.testing.attack`"""
