"""The page that the service shows at `/`: overview, gallery, samples and health of a cache."""
