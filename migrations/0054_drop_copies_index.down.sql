CREATE INDEX checkpoint_copies_runner_idx ON checkpoint_copies (runner_id);
