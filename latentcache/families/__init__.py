"""Model families: what each one's encoders return and what its denoiser expects. No module here imports torch."""
