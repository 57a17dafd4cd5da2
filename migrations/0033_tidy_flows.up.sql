-- What sandboxes sent is kept for a time (docs/adr/0037-the-journal-of-what-left.md).

-- Makes the partitions of this month and the next two, and drops those whose months ended before keep. The default partition has what a
-- clock that is wrong says, and what came after its month was dropped: of that, what came before keep is deleted. The owner alone can take
-- the trigger off, for the length of this transaction and under a lock that nobody writes there beside.
CREATE FUNCTION coppice_tidy_flows(keep interval) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, public, pg_temp SET lock_timeout = '500ms' SET timezone = 'UTC' AS $$
DECLARE
    part text;
BEGIN
    IF keep IS NULL OR keep < interval '1 day' THEN
        RAISE EXCEPTION 'flows are kept for a day at least, not for %', keep;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('coppice_tidy_flows'));
    PERFORM public.coppice_make_flow_partitions();
    FOR part IN
        SELECT c.relname FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid
        WHERE h.inhparent = 'public.flows'::regclass AND c.relname ~ '^flows_[0-9]{6}$' ORDER BY c.relname
    LOOP
        IF to_date(right(part, 6), 'YYYYMM') + interval '1 month' <= now() - keep THEN
            EXECUTE format('DROP TABLE public.%I', part);
        END IF;
    END LOOP;
    IF EXISTS (SELECT 1 FROM public.flows_default WHERE created_at <= now() - keep) THEN
        ALTER TABLE public.flows_default DISABLE TRIGGER flows_append_only;
        DELETE FROM public.flows_default WHERE created_at <= now() - keep;
        ALTER TABLE public.flows_default ENABLE TRIGGER flows_append_only;
    END IF;
END
$$;
REVOKE EXECUTE ON FUNCTION coppice_tidy_flows(interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION coppice_tidy_flows(interval) TO coppice_app;
