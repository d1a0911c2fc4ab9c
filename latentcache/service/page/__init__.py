"""The page that a person sees at `/`: overview, gallery, samples and health of a cache."""
