DROP TABLE flow_rows;
ALTER TABLE flows DROP CONSTRAINT flows_count_check;
ALTER TABLE flows
    DROP COLUMN count,
    DROP COLUMN last_at;
