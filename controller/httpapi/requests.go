package httpapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/controller/tree"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// What the contract's schema cannot say is checked here, on the way in.

var (
	envName   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	labelName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$`)
)

// The shape of a workspace whose request does not say.
var defaultResources = core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}

func waitOf(w *api.Wait) time.Duration {
	if w == nil {
		return controller.DefaultWait
	}
	return seconds(int64(*w))
}

// envIn checks names. An empty environment is the same as none.
func envIn(field string, env api.Env) (map[string]string, error) {
	if len(env) == 0 {
		return nil, nil
	}
	for name := range env {
		if !envName.MatchString(name) {
			return nil, invalid(field, fmt.Sprintf("%q is not the name of an environment variable", core.Clip(name)))
		}
	}
	return env, nil
}

func labelsIn(labels api.Labels) (map[string]string, error) {
	for key := range labels {
		if err := checkLabel(key); err != nil {
			return nil, err
		}
	}
	return labels, nil
}

func labelsPatchIn(labels api.LabelsPatch) (map[string]*string, error) {
	for key := range labels {
		if err := checkLabel(key); err != nil {
			return nil, err
		}
	}
	return labels, nil
}

func checkLabel(key string) error {
	if key == builds.Label { // a build would take the checkpoint for one of its own, and the image may reach more
		return invalid("labels", key+" is set by builds only")
	}
	if !labelName.MatchString(key) {
		return invalid("labels", fmt.Sprintf("%q is not a label key: 1 to 63 letters, digits, dots, underscores, slashes or hyphens", core.Clip(key)))
	}
	return nil
}

// labelFilter reads "key=value" and "key".
func labelFilter(list api.LabelFilter) (map[string]*string, error) {
	out := map[string]*string{}
	for _, item := range list {
		key, value, has := strings.Cut(item, "=")
		if !labelName.MatchString(key) {
			return nil, invalid("label", fmt.Sprintf("%q is neither key nor key=value", core.Clip(item)))
		}
		out[key] = nil
		if has {
			out[key] = &value
		}
	}
	return out, nil
}

func annotationsIn(m map[string]any) (map[string]json.RawMessage, error) {
	if m == nil {
		return nil, nil
	}
	out := make(map[string]json.RawMessage, len(m))
	for k, v := range m {
		b, err := json.Marshal(v)
		if err != nil {
			return nil, fmt.Errorf("encode annotation: %w", err)
		}
		out[k] = b
	}
	if n := tree.SizeOf(out); n > tree.MaxAnnotations {
		return nil, invalid("annotations", fmt.Sprintf("they are %d bytes as JSON; at most %d are kept", n, tree.MaxAnnotations))
	}
	return out, nil
}

const fieldAllow = "network.allow"

// allowIn reads what may be reached; nil is not asked for.
func allowIn(list *api.Allow) (*[]string, error) {
	if list == nil {
		return nil, nil
	}
	p, err := policy.Parse(fieldAllow, *list)
	if err == nil {
		err = p.CheckSize(fieldAllow)
	}
	if e, ok := errors.AsType[*core.Error](err); ok {
		return nil, &fieldsError{e, []api.FieldProblem{{Field: fieldAllow, Detail: e.Msg}}}
	}
	entries := p.Entries()
	return &entries, err
}

// networkPatchIn reads changes of what a workspace may reach.
func networkPatchIn(n api.NetworkPatch, p *controller.WorkspacePatch) (err error) {
	if n.Allow != nil && len(n.Add)+len(n.Remove) > 0 {
		return invalid(fieldAllow, "it replaces all entries, so it cannot be given together with add or remove")
	}
	if p.Allow, err = allowIn(n.Allow); err != nil {
		return err
	}
	for _, c := range []struct {
		field string
		from  api.Allow
		to    *[]string
	}{{"network.add", n.Add, &p.Add}, {"network.remove", n.Remove, &p.Remove}} {
		entries, err := policy.Parse(c.field, c.from)
		if e, ok := errors.AsType[*core.Error](err); ok {
			return &fieldsError{e, []api.FieldProblem{{Field: c.field, Detail: e.Msg}}}
		}
		if err != nil {
			return err
		}
		*c.to = entries.Entries()
	}
	return nil
}

// grantsIn reads which grants forks have.
func grantsIn(g api.Grants) (out grants.Choice, err error) {
	const want = "it must be inherit, none, or a list of ids of grants"
	switch v := g.(type) {
	case nil:
		return out, nil
	case string:
		out.None = v == "none"
		if v != "none" && v != "inherit" {
			err = invalid("grants", want)
		}
		return out, err
	case []any:
		if len(v) > grants.MaxGrants {
			return out, invalid("grants", "there are at most "+strconv.Itoa(grants.MaxGrants))
		}
		out.None = len(v) == 0
		for _, one := range v {
			name, ok := one.(string)
			if !ok || grants.CheckName(name) != nil {
				return out, invalid("grants", want)
			}
			out.Names = append(out.Names, name)
		}
		return out, nil
	}
	return out, invalid("grants", want)
}

func resourcesIn(r api.ResourcesRequest) core.Resources {
	or := func(v *int, other int) int {
		if v == nil {
			return other
		}
		return *v
	}
	return core.Resources{VCPUs: or(r.VCPUs, defaultResources.VCPUs), MemoryMiB: or(r.MemoryMiB, defaultResources.MemoryMiB), DiskGiB: or(r.DiskGiB, defaultResources.DiskGiB)}
}

func createIn(b api.CreateWorkspaceRequest) (controller.CreateRequest, error) {
	out := controller.CreateRequest{
		Name: b.Name, Image: b.Image, Resources: resourcesIn(b.Resources), Shaped: b.Resources != api.ResourcesRequest{}, TTL: seconds(b.TTLSeconds),
	}
	var err error
	if out.IdlePolicy, err = idlePolicyIn(b.IdleSeconds, b.OnIdle, b.AutoResume, b.OnTTL); err != nil {
		return out, err
	}
	out.Egress = core.EgressPolicy(b.Network.EgressPolicy)
	allow, err := allowIn(b.Network.Allow)
	if err != nil {
		return out, err
	}
	if allow != nil {
		out.Allow = *allow
	}
	if out.Env, err = envIn("env", b.Env); err != nil {
		return out, err
	}
	out.Labels, err = labelsIn(b.Labels)
	return out, err
}

// forkOptions are the fields that every fork request has.
type forkOptions struct {
	count        *int
	name         string
	allOrNothing bool
	env          api.Env
	labels       api.Labels
	network      api.NetworkRequest
	ttl          int64
	grants       api.Grants
	idle         api.Idle
	onIdle       api.OnIdle
	autoResume   api.AutoResume
	onTTL        api.OnTTL
}

// idlePolicyIn reads what becomes of a workspace that is not used.
func idlePolicyIn(idle api.Idle, onIdle api.OnIdle, autoResume api.AutoResume, onTTL api.OnTTL) (controller.IdlePolicy, error) {
	out := controller.IdlePolicy{IdleAfter: seconds(idle), OnIdle: controller.IdleAction(onIdle), AutoResume: autoResume, OnTTL: controller.IdleAction(onTTL)}
	switch {
	case idle == 0 && onIdle != "":
		return out, invalid("on_idle", "it needs idle_seconds")
	case idle > 0 && onIdle == "":
		out.OnIdle = controller.IdleSuspend
	}
	return out, nil
}

func forkIn(g forkOptions) (controller.ForkRequest, error) {
	out := controller.ForkRequest{Count: 1, Name: g.name, AllOrNothing: g.allOrNothing, TTL: seconds(g.ttl)}
	if g.count != nil {
		out.Count = *g.count
	}
	var err error
	if out.Grants, err = grantsIn(g.grants); err != nil {
		return out, err
	}
	if out.IdlePolicy, err = idlePolicyIn(g.idle, g.onIdle, g.autoResume, g.onTTL); err != nil {
		return out, err
	}
	out.Egress = core.EgressPolicy(g.network.EgressPolicy)
	if out.Allow, err = allowIn(g.network.Allow); err != nil {
		return out, err
	}
	if out.Env, err = envIn("env", g.env); err != nil {
		return out, err
	}
	out.Labels, err = labelsIn(g.labels)
	return out, err
}

func checkpointRequestIn(b api.CreateCheckpointRequest) (controller.CheckpointRequest, error) {
	out := controller.CheckpointRequest{Name: b.Name, Pinned: b.Pinned, Prepare: prepare.Wanted{Count: b.Prepare}}
	var err error
	if out.Labels, err = labelsIn(b.Labels); err != nil {
		return out, err
	}
	out.Annotations, err = annotationsIn(b.Annotations)
	return out, err
}

func execIn(b api.ExecRequest) (req controller.ExecRequest, wait bool, err error) {
	wait = b.Wait == nil && !b.PTY || b.Wait != nil && *b.Wait
	switch {
	case b.PTY && wait:
		return req, wait, invalid("wait", "it cannot be true together with pty: a program on a terminal waits for its input, which goes through /attach")
	case b.Stdin != "" && len(b.StdinBase64) > 0:
		return req, wait, invalid("stdin_base64", "it cannot be given together with stdin")
	case b.StdinOpen && wait:
		return req, wait, invalid("stdin_open", "it needs wait to be false: nobody could write while the request waits")
	case !b.PTY && (b.Cols != 0 || b.Rows != 0):
		return req, wait, invalid("cols", "cols and rows need pty")
	case b.Command[0] == "":
		return req, wait, invalid("command.0", "the program's name is empty")
	}
	req = controller.ExecRequest{
		Command: b.Command, Cwd: b.Cwd, Stdin: []byte(b.Stdin), StdinOpen: b.StdinOpen, TimeoutMS: b.TimeoutMS, PTY: b.PTY,
		Cols: uint16(b.Cols), Rows: uint16(b.Rows), User: b.User, //nolint:gosec // G115: the contract bounds them at 1000
	}
	if len(b.StdinBase64) > 0 {
		req.Stdin = b.StdinBase64
	}
	req.Env, err = envIn("env", b.Env)
	return req, wait, err
}

func listenIn(s string) (netip.AddrPort, error) {
	if s == "" {
		return netip.AddrPort{}, nil
	}
	if text, ok := strings.CutPrefix(s, ":"); ok {
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			return netip.AddrPort{}, invalid("listen", "it must be ip:port or :port, such as 127.0.0.1:8080 or :8080")
		}
		return netip.AddrPortFrom(netip.Addr{}, uint16(port)), nil
	}
	addr, err := netip.ParseAddrPort(s)
	if err != nil {
		return addr, invalid("listen", "it must be ip:port or :port, such as 127.0.0.1:8080 or :8080")
	}
	return addr, nil
}
