package controlplane

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/internal/test/bench/report"
)

// statement is the database's work for one kind of statement in a stage.
type statement struct {
	ID    int64   `json:"-"` // the server's, of the text without its values
	Query string  `json:"query"`
	Calls int64   `json:"calls"`
	MS    float64 `json:"ms"`    // of a call
	Pages float64 `json:"pages"` // that a call looked at, in its cache or on the disk
	Rows  float64 `json:"rows"`  // that a call returned or changed
}

// countStatements begins a stage.
func (c *cell) countStatements(ctx context.Context) error {
	return c.exec(ctx, "SELECT pg_stat_statements_reset()")
}

// statements returns those of the stage, most expensive first.
func (c *cell) statements(ctx context.Context) ([]statement, error) {
	rows, err := c.db.Query(ctx, `
		SELECT queryid, min(query) AS query, sum(calls)::bigint AS calls, sum(total_exec_time) / sum(calls) AS ms, (sum(shared_blks_hit + shared_blks_read) / sum(calls))::float8 AS pages,
			(sum(rows) / sum(calls))::float8 AS rows
		FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND calls > 0
		GROUP BY queryid ORDER BY sum(total_exec_time) DESC LIMIT 200`)
	if err != nil {
		return nil, err
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[statement])
	for i := range list {
		list[i].Query = strings.Join(strings.Fields(list[i].Query), " ")
		list[i].Query = list[i].Query[:min(len(list[i].Query), 400)]
	}
	return list, err
}

// mostExpensive returns the ten statements of the stage that took the most time.
func (c *cell) mostExpensive(ctx context.Context) ([]statement, error) {
	list, err := c.statements(ctx)
	return list[:min(len(list), 10)], err
}

// showStatements prints what statements cost in a stage of some seconds.
func showStatements(p *report.Printer, title string, list []statement, seconds float64) {
	rows := [][]string{{"calls/s", "ms", "pages", "rows", "statement"}}
	for _, s := range list {
		rows = append(rows, []string{
			report.Number(float64(s.Calls) / seconds), report.Number(s.MS), report.Number(s.Pages), report.Number(s.Rows), s.Query[:min(len(s.Query), 100)],
		})
	}
	p.Line("\n%s", title)
	p.Columns(rows)
}

// growth is a statement whose calls cost more in a large fleet than in a small one.
type growth struct {
	Query       string  `json:"query"`
	Calls       int64   `json:"calls"` // in the large one
	PagesBefore float64 `json:"pages_before"`
	PagesAfter  float64 `json:"pages_after"`
	RowsBefore  float64 `json:"rows_before"`
	RowsAfter   float64 `json:"rows_after"`
	MSBefore    float64 `json:"ms_before"`
	MSAfter     float64 `json:"ms_after"`
}

// grew compares a stage in a small fleet with the same stage in a large one, by the number of pages that calls read:
// that depends on no clock. A few more pages come from the depth of an index.
func grew(small, large []statement) []growth {
	const pages, rows = 10, 2 // what is less says nothing
	before := map[int64]statement{}
	for _, s := range small {
		before[s.ID] = s
	}
	var list []growth
	for _, s := range large {
		was, there := before[s.ID]
		if !there || s.Calls < 2 || s.Pages <= pages+2*was.Pages && s.Rows <= rows+2*was.Rows {
			continue
		}
		list = append(list, growth{
			Query: s.Query, Calls: s.Calls, PagesBefore: was.Pages, PagesAfter: s.Pages, RowsBefore: was.Rows, RowsAfter: s.Rows, MSBefore: was.MS, MSAfter: s.MS,
		})
	}
	slices.SortStableFunc(list, func(a, b growth) int { return cmp.Compare(b.MSAfter*float64(b.Calls), a.MSAfter*float64(a.Calls)) })
	return list[:min(len(list), 20)]
}

// tableSize is a table with its indexes and partitions.
type tableSize struct {
	Table      string `json:"table"`
	Rows       int64  `json:"rows"` // an estimate
	TableBytes int64  `json:"table_bytes"`
	IndexBytes int64  `json:"index_bytes"`
	Dead       int64  `json:"dead_rows"`
	Vacuums    int64  `json:"vacuums"` // by autovacuum
}

func (t tableSize) bytes() int64 { return t.TableBytes + t.IndexBytes }

// tableSizes lists them, largest first.
func (c *cell) tableSizes(ctx context.Context) ([]tableSize, error) {
	rows, err := c.db.Query(ctx, `
		SELECT name, sum(n_live_tup)::bigint, sum(pg_table_size(relid))::bigint, sum(pg_indexes_size(relid))::bigint, sum(n_dead_tup)::bigint, sum(autovacuum_count)::bigint
		FROM (SELECT s.*, coalesce((SELECT i.inhparent::regclass::text FROM pg_inherits i WHERE i.inhrelid = s.relid), s.relname) AS name FROM pg_stat_user_tables s) AS t
		GROUP BY name ORDER BY sum(pg_total_relation_size(relid)) DESC`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[tableSize])
}
