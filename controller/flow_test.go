package controller_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
)

// TestFlowsAreCounted: each flow counts once, when it has ended, however often it is told and however many come at once.
func TestFlowsAreCounted(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.Metrics = reg })
	ws := w.create("ws")
	var in runnerapi.Flows
	for i := range 2500 {
		f := core.Flow{ID: fmt.Sprint("f", i), SandboxID: ws.Sandbox.ID, At: time.Now(), Spoken: core.SpokenTLS, Host: "a.example", Port: 443, Outcome: core.FlowAllowed}
		in.Flows = append(in.Flows, f)
		switch i % 3 {
		case 0:
			f.Ended = f.At.Add(time.Second)
			in.Flows = append(in.Flows, f)
		case 1:
			in.Flows[len(in.Flows)-1].Outcome = core.FlowDenied
		}
	}
	for range 2 {
		if err := w.Flows().Record(t.Context(), w.runner.ID(), in); err != nil {
			t.Fatal(err)
		}
	}
	got := testmetrics.Of(t, reg)
	const counter = "coppice_controller_flows_total "
	maps.DeleteFunc(got, func(key string, _ float64) bool { return !strings.HasPrefix(key, counter) })
	if len(got) != 2 || got[counter+"allowed tls"] != 834 || got[counter+"denied tls"] != 833 {
		t.Errorf("counted: %v", got)
	}
	list, err := w.Flows().List(t.Context(), w.project, ws.ID, flows.Filter{Limit: 3000})
	if err != nil || len(list) != 2500 {
		t.Errorf("%d are kept, %v", len(list), err)
	}
}

// TestManyFlowsInOne: a record of many flows counts as all of them, and a count of anything but denied flows is not believed.
func TestManyFlowsInOne(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) {
		c.Metrics, c.FlowQuota = reg, flows.Quota{Denied: flows.RowQuota{Workspace: 1, Project: 100}}
	})
	ws := w.create("ws")
	flow := func(id string, o core.Outcome, count int64) core.Flow {
		at := time.Now()
		return core.Flow{ID: id, SandboxID: ws.Sandbox.ID, At: at, Ended: at, Last: at, Count: count, Spoken: core.SpokenHTTP, Method: "POST", Host: "a.example", Port: 80, Outcome: o}
	}
	in := runnerapi.Flows{Flows: []core.Flow{
		flow("a", core.FlowDenied, 4000), flow("b", core.FlowAllowed, 1<<62), flow("c", core.FlowDenied, -5), flow("d", core.FlowDenied, 10), flow("e", core.FlowAllowed, 0), flow("f", core.FlowDenied, 1<<62),
	}}
	if err := w.Flows().Record(t.Context(), w.runner.ID(), in); err != nil {
		t.Fatal(err)
	}
	counts := map[string]float64{}
	for key, n := range testmetrics.Of(t, reg) {
		counts[strings.Fields(key)[0]] += n
	}
	if counts["coppice_controller_flows_total"] != 4000+1+1+1 || counts["coppice_controller_flows_omitted_total"] != 10+(1<<50) {
		t.Errorf("counted: %v and %v left out", counts["coppice_controller_flows_total"], counts["coppice_controller_flows_omitted_total"])
	}
	omitted, err := w.Flows().Omitted(t.Context(), w.project, ws.ID)
	if err != nil || omitted.Count != 10+(1<<50) {
		t.Errorf("left out: %+v, %v", omitted, err)
	}
}
