"""One model's experts over several processes, on one machine or several (DualSparse-MoE sections 3.3 and 4.3)."""
