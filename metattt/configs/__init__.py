"""The Hydra configuration groups of MetaTTT, found as `pkg://metattt.configs` from any working directory."""
