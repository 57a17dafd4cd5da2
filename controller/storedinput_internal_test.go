package controller

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
)

// TestStoredInputs reads the input of each kind of operation as the versions before kinds had types of their own stored it, and stores the
// same again: a controller of either version can resume what the other has begun.
func TestStoredInputs(t *testing.T) {
	t.Parallel()
	const (
		children = `"children":[{"workspace_id":"ws_1","sandbox_id":"sbx_1"},{"workspace_id":"ws_2","sandbox_id":"sbx_2"}]`
		capture  = `"capture":"ckpt_2","epoch":3,"sandbox":"sbx_9"`
		switched = `"source":"ckpt_1","epoch":3,"sandbox":"sbx_9","next":"sbx_10"`
		plan     = `"prune":{"items":[{"checkpoint_id":"ckpt_1","reason":"age","bytes":7}],"planned":1,"kept":2,"kept_bytes":9}`
		request  = `"fork":{"Count":0,"Name":"","AllOrNothing":false,"Spread":false,"Egress":"","Allow":["example.com"],"Env":{"A":"1"},
			"Grants":{"None":false,"Names":["token"]},"Labels":{"b":"2"},"TTL":60,"IdlePolicy":{"IdleAfter":0,"OnIdle":"","AutoResume":false,"OnTTL":""}}`
	)
	list := []childInput{{"ws_1", "sbx_1"}, {"ws_2", "sbx_2"}}
	captured := captureInput{Capture: "ckpt_2", Epoch: 3, Sandbox: "sbx_9"}
	next := switchInput{Source: "ckpt_1", Epoch: 3, Sandbox: "sbx_9", Next: "sbx_10"}
	seen := map[OperationKind]bool{}
	for _, c := range []struct {
		kind   OperationKind
		stored string
		want   kind
	}{
		{OpCreateWorkspace, `{` + children + `}`, &createWorkspace{forkInput: forkInput{Children: list}}},
		{OpCreateWorkspace, `{` + children + `,"source":"ckpt_1"}`, &createWorkspace{forkInput: forkInput{Children: list, Source: "ckpt_1"}}},
		{OpCreateTemplate, `{"capture":"ckpt_2"}`, &createTemplate{Capture: "ckpt_2"}},
		{OpCreateCheckpoint, `{` + capture + `}`, &createCheckpoint{captured}},
		{OpForkCheckpoint, `{` + children + `,"all_or_nothing":true,"source":"ckpt_1"}`, &forkCheckpoint{forkInput{Children: list, AllOrNothing: true, Source: "ckpt_1"}}},
		{OpRestoreCheckpoint, `{` + children + `,"source":"ckpt_1"}`, &restoreCheckpoint{forkInput{Children: list, Source: "ckpt_1"}}},
		{OpForkWorkspace, `{` + children + `,"all_or_nothing":true,` + capture + `}`, &forkWorkspace{captureInput: captured, Children: list, AllOrNothing: true}},
		{OpRestoreWorkspace, `{` + switched + `}`, &restoreWorkspace{next}},
		{OpTerminateWorkspace, `{"epoch":3}`, &terminateWorkspace{Epoch: 3}},
		{OpSuspendWorkspace, `{` + capture + `}`, &suspendWorkspace{captured}},
		{OpResumeWorkspace, `{"source":"ckpt_1","epoch":3,"next":"sbx_10"}`, &resumeWorkspace{switchInput{Source: "ckpt_1", Epoch: 3, Next: "sbx_10"}}},
		{OpPruneCheckpoints, `{` + plan + `}`, &pruneCheckpoints{Prune: &PruneResult{
			Items: []PruneItem{{ID: "ckpt_1", Reason: "age", Bytes: 7}}, Planned: 1, Kept: 2, KeptBytes: 9,
		}}},
		{OpCreateWorkspace, `{` + children + `,"source":"ckpt_1","built":true}`, &createWorkspace{forkInput: forkInput{Children: list, Source: "ckpt_1"}, Built: true}},
		{
			OpBuildImage, `{"name":"app","from":"base","steps":[{"run":"true"},{"copy":{"upload":"u","dest":"/d/"}},{"env":{"A":"1"}},{"workdir":"/w"},{"user":"u"}],"start":{"command":"s","ready":{"port":80,"seconds":5}},"resources":{"vcpus":1,"memory_mib":512,"disk_gib":1},"egress":"deny-all","allow":["a.example"]}`,
			&buildImage{Spec: builds.Spec{
				Name: "app", From: "base", Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}, Egress: "deny-all", Allow: []string{"a.example"},
				Steps: []builds.Step{{Run: "true"}, {Copy: &builds.CopyStep{Upload: "u", Dest: "/d/"}}, {Env: map[string]string{"A": "1"}}, {Workdir: "/w"}, {User: "u"}},
				Start: &builds.Start{Command: "s", Ready: &builds.Ready{Port: 80, Seconds: 5}},
			}},
		},
		{OpStepCheckpoint, `{"parallel":8,` + request + `}`, &stepCheckpoint{Parallel: 8, Fork: ForkRequest{
			Allow: &[]string{"example.com"}, Env: map[string]string{"A": "1"}, Labels: map[string]string{"b": "2"}, TTL: 60, Grants: grants.Choice{Names: []string{"token"}},
		}}},
		{OpStepWorkspace, `{"parallel":1,` + request + `}`, &stepCheckpoint{Parallel: 1, Fork: ForkRequest{
			Allow: &[]string{"example.com"}, Env: map[string]string{"A": "1"}, Labels: map[string]string{"b": "2"}, TTL: 60, Grants: grants.Choice{Names: []string{"token"}},
		}}},
	} {
		seen[c.kind] = true
		op := Operation{ID: "op_1", Kind: c.kind, Input: json.RawMessage(c.stored)}
		got, err := kindOf(op)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v; want %+v", c.kind, got, err, c.want)
			continue
		}
		again, err := json.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		var before, after map[string]any
		if err := json.Unmarshal([]byte(c.stored), &before); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(again, &after); err != nil || !reflect.DeepEqual(before, after) {
			t.Errorf("%s: %s is stored as %s, %v", c.kind, c.stored, again, err)
		}
		if ids := WorkspacesOf(op); len(got.made().children) > 0 && !reflect.DeepEqual(ids, []core.WorkspaceID{"ws_1", "ws_2"}) {
			t.Errorf("%s: it makes %v", c.kind, ids)
		}
	}
	for k := range kinds {
		if !seen[k] {
			t.Errorf("no stored input of %s is read", k)
		}
	}
	if _, err := kindOf(Operation{Kind: "later_kind", Input: json.RawMessage(`{}`)}); err == nil {
		t.Error("a kind that this program does not know was accepted")
	}
}
