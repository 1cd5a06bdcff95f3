"""Agents that know the problem: exact and near-exact yardsticks, one module per environment, all with SB3's ``predict``."""
