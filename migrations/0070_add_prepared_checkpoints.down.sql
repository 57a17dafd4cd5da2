DROP TABLE prepared_checkpoints;
