ALTER TABLE grants
    DROP CONSTRAINT grants_bytes_check,
    DROP COLUMN secret_bytes,
    DROP COLUMN bundle_bytes;
