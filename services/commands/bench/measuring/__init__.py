"""What every benchmark needs: processes, machine facts, statistics, reports."""
