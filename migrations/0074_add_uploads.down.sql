DROP TABLE upload_parts;
DROP TABLE uploads;
