"""Conditional densities with two uncertainties, in torch and zuko alone."""
