# Runs in a copy of the workspace. A fraction, so that partial progress has a score.
python3 -I -S "$TESTS_DIR/score.py" "$TESTS_DIR" > "$VERIFIER_DIR/reward.txt"
