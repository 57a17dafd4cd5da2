ALTER TABLE runners
    DROP COLUMN data_log,
    DROP COLUMN data_recorded;
