"""Figures: what runs recorded, as series with one style for each method, and the plots of them."""
