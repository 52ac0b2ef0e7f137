"""The YAML files that join MetaTTT's configuration groups, laid out like `metattt/configs`."""
