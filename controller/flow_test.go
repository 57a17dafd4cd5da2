package controller_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
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
		if err := w.RecordFlows(t.Context(), w.runner.ID(), in); err != nil {
			t.Fatal(err)
		}
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, family := range families {
		if family.GetName() == "coppice_controller_flows_total" {
			for _, m := range family.GetMetric() {
				got[m.GetLabel()[0].GetValue()+" "+m.GetLabel()[1].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	if len(got) != 2 || got["allowed tls"] != 834 || got["denied tls"] != 833 {
		t.Errorf("counted: %v", got)
	}
	list, err := w.Flows(t.Context(), w.project, ws.ID, controller.FlowFilter{Limit: 3000})
	if err != nil || len(list) != 2500 {
		t.Errorf("%d are kept, %v", len(list), err)
	}
}
