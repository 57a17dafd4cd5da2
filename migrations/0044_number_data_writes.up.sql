-- Writes by pass are numbered in a log of their runner. Which were recorded last: those up to there are not recorded again.
ALTER TABLE runners
    ADD COLUMN data_log text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN data_recorded bigint NOT NULL DEFAULT 0;
