package testpg

import (
	"flag"
	"slices"
	"testing"
	"time"
)

var long = flag.Bool("long", false, "measure what a synchronous standby costs")

// TestPair fails over twice: commits that the standby had are there, and commits after the cut are not.
func TestPair(t *testing.T) {
	t.Parallel()
	p := NewPair(t, false)
	p.SQL(p.Primary(), "CREATE TABLE things (id int PRIMARY KEY)", "INSERT INTO things VALUES (1)")
	for id := range int64(2) {
		if id > 0 {
			p.AddStandby()
		}
		p.Cut()
		p.SQL(p.Primary(), "INSERT INTO things VALUES (100)")
		p.Failover()
		if n := p.Number(p.Primary(), `SELECT sum(id) FROM things`); n != 1 {
			t.Errorf("after failover %d the sum is %d, want 1", id, n)
		}
		conn := connect(t, p.DSN("postgres"))
		if _, err := conn.Exec(t.Context(), `INSERT INTO things VALUES (2)`); err != nil {
			t.Error(err)
		}
		p.SQL(p.Primary(), "DELETE FROM things WHERE id = 2")
	}
}

// TestSynchronousPair: acknowledged commits are on the standby, without any wait. -long measures the cost, in turns.
func TestSynchronousPair(t *testing.T) {
	t.Parallel()
	p := NewPair(t, true)
	p.SQL(p.Primary(), "CREATE TABLE things (id bigserial PRIMARY KEY)")
	n := 20
	if *long {
		n = 1000
	}
	conn := connect(t, p.Primary().DSN("postgres"))
	took := map[string][]time.Duration{}
	for range n {
		for _, mode := range []string{"local", "on"} {
			if _, err := conn.Exec(t.Context(), "SET synchronous_commit = "+mode); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if _, err := conn.Exec(t.Context(), "INSERT INTO things DEFAULT VALUES"); err != nil {
				t.Fatal(err)
			}
			took[mode] = append(took[mode], time.Since(began))
		}
	}
	p.Failover()
	if got := p.Number(p.Primary(), `SELECT count(*) FROM things`); got != int64(2*n) {
		t.Errorf("%d of %d acknowledged rows are there", got, 2*n)
	}
	if !*long {
		return
	}
	at := func(mode string, q float64) time.Duration {
		slices.Sort(took[mode])
		return took[mode][int(q*float64(n-1))]
	}
	for _, q := range []float64{0.5, 0.99} {
		t.Logf("a commit at the %.0fth percentile: asynchronous %s, synchronous %s, ratio %.2f", 100*q, at("local", q), at("on", q), float64(at("on", q))/float64(at("local", q)))
	}
}
