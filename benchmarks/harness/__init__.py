"""What ``python -m benchmarks`` runs on: experiments are files, jobs are trained by rl-zoo3, joblib distributes them."""
