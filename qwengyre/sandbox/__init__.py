"""Tasks, the launcher of black-box harnesses, their isolation, and the evaluator of what they leave behind."""
