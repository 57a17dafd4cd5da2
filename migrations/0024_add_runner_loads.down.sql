DROP TRIGGER sandboxes_load ON sandboxes;
DROP TRIGGER sandboxes_begin_load ON sandboxes;
DROP TRIGGER runners_load ON runners;
DROP FUNCTION coppice_count_sandboxes();
DROP FUNCTION coppice_make_runner_load();
DROP TABLE runner_loads;
