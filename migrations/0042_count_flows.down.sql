DROP TABLE flow_batches;
DROP TABLE flow_counts;
ALTER TABLE flow_rows
    DROP COLUMN effects,
    DROP COLUMN denied;
