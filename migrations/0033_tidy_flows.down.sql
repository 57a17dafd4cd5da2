DROP FUNCTION coppice_tidy_flows(interval);
