package deploytest

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/json"
	sigsyaml "sigs.k8s.io/yaml"
)

const chartDir = root + "/deploy/helm/coppice"

// kinds are those that the chart may make.
var kinds = map[string]func() metav1.Object{
	"apps/v1/Deployment":            func() metav1.Object { return new(appsv1.Deployment) },
	"apps/v1/DaemonSet":             func() metav1.Object { return new(appsv1.DaemonSet) },
	"batch/v1/Job":                  func() metav1.Object { return new(batchv1.Job) },
	"v1/Service":                    func() metav1.Object { return new(corev1.Service) },
	"v1/Pod":                        func() metav1.Object { return new(corev1.Pod) },
	"policy/v1/PodDisruptionBudget": func() metav1.Object { return new(policyv1.PodDisruptionBudget) },
	"networking.k8s.io/v1/Ingress":  func() metav1.Object { return new(networkingv1.Ingress) },
}

// manifests are the objects of a rendered chart by "Kind/name", and its notes.
type manifests struct {
	objects map[string]metav1.Object
	notes   string
}

// merge is over on base, as values files are merged.
func merge(base, over map[string]any) map[string]any {
	out := maps.Clone(base)
	for k, v := range over {
		if a, ok := out[k].(map[string]any); ok {
			if b, ok := v.(map[string]any); ok {
				v = merge(a, b)
			}
		}
		out[k] = v
	}
	return out
}

func values(t *testing.T, file string, more string) map[string]any {
	t.Helper()
	var v, over map[string]any
	if err := sigsyaml.Unmarshal([]byte(readFile(t, filepath.Join(chartDir, "ci", file))), &v); err != nil {
		t.Fatal(err)
	}
	if err := sigsyaml.Unmarshal([]byte(more), &over); err != nil {
		t.Fatal(err)
	}
	return merge(v, over)
}

// render is `helm template`: values are checked against the schema, and templates executed by Helm's engine, strictly.
func render(t *testing.T, v map[string]any) (map[string]string, error) {
	t.Helper()
	chart, err := loader.Load(chartDir)
	if err != nil {
		t.Fatal(err)
	}
	top, err := util.ToRenderValues(chart, v, common.ReleaseOptions{Name: "trial", Namespace: "sandboxes", Revision: 1, IsInstall: true}, nil)
	if err != nil {
		return nil, err
	}
	return engine.Engine{Strict: true}.RenderWithContext(t.Context(), chart, top)
}

// decode reads what was rendered into Kubernetes' own types, strictly: a field that a kind does not have is an error.
func decode(t *testing.T, files map[string]string) manifests {
	t.Helper()
	m := manifests{objects: map[string]metav1.Object{}}
	for path, text := range files {
		if strings.HasSuffix(path, "NOTES.txt") {
			m.notes = text
			continue
		}
		reader := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
		for {
			doc, err := reader.Read()
			if err != nil {
				break
			}
			var head metav1.TypeMeta
			if err := sigsyaml.Unmarshal(doc, &head); err != nil {
				t.Fatalf("%s: %v\n%s", path, err, doc)
			}
			if head.Kind == "" {
				continue // a template that was off
			}
			object, ok := kinds[head.APIVersion+"/"+head.Kind]
			if !ok {
				t.Fatalf("%s makes a %s of %s, which this test does not know", path, head.Kind, head.APIVersion)
			}
			o := object()
			if err := strict(doc, o); err != nil {
				t.Fatalf("%s: %v\n%s", path, err, doc)
			}
			name := head.Kind + "/" + o.GetName()
			if m.objects[name] != nil {
				t.Errorf("%s is made twice", name)
			}
			m.objects[name] = o
		}
	}
	return m
}

// strict decodes as Kubernetes' API does when it is asked to be strict: a field that is not there, twice there or in other letters is an error.
func strict(doc []byte, o any) error {
	text, err := sigsyaml.YAMLToJSONStrict(doc)
	if err != nil {
		return err
	}
	faults, err := json.UnmarshalStrict(text, o)
	return errors.Join(append(faults, err)...)
}

// pods are the templates of pods by the name of what makes them.
func (m manifests) pods() map[string]corev1.PodTemplateSpec {
	out := map[string]corev1.PodTemplateSpec{}
	for name, o := range m.objects {
		switch o := o.(type) {
		case *appsv1.Deployment:
			out[name] = o.Spec.Template
		case *appsv1.DaemonSet:
			out[name] = o.Spec.Template
		case *batchv1.Job:
			out[name] = o.Spec.Template
		case *corev1.Pod:
			out[name] = corev1.PodTemplateSpec{ObjectMeta: o.ObjectMeta, Spec: o.Spec}
		}
	}
	return out
}

func containers(p corev1.PodSpec) []corev1.Container {
	return append(slices.Clone(p.InitContainers), p.Containers...)
}

const full = "full.yaml"

// each renders the chart with every values file.
func each(t *testing.T, check func(t *testing.T, m manifests)) {
	t.Helper()
	for _, file := range []string{"small.yaml", full} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			files, err := render(t, values(t, file, ""))
			if err != nil {
				t.Fatal(err)
			}
			check(t, decode(t, files))
		})
	}
}

func TestChartLints(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"small.yaml", full} {
		result := lint.RunAll(chartDir, values(t, file, ""), "sandboxes")
		for _, m := range result.Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %v", file, m)
			}
		}
	}
	if result := lint.RunAll(chartDir, map[string]any{}, "sandboxes"); result.HighestSeverity < support.ErrorSev {
		t.Error("the linter has nothing against a chart without images and secrets")
	}
}

func TestChartObjects(t *testing.T) {
	t.Parallel()
	for file, want := range map[string][]string{
		"small.yaml": {"DaemonSet/trial-coppice-runner", "Deployment/trial-coppice-controller", "Pod/trial-coppice-ready", "Service/trial-coppice-controller", "Service/trial-coppice-controller-runners"},
		full: {
			"DaemonSet/trial-coppice-runner", "Deployment/trial-coppice-controller", "Ingress/trial-coppice-controller", "Job/trial-coppice-migrate", "Pod/trial-coppice-ready",
			"PodDisruptionBudget/trial-coppice-controller", "Service/trial-coppice-controller", "Service/trial-coppice-controller-runners",
		},
	} {
		files, err := render(t, values(t, file, ""))
		if err != nil {
			t.Fatal(err)
		}
		m := decode(t, files)
		if got := slices.Sorted(maps.Keys(m.objects)); !slices.Equal(got, want) {
			t.Errorf("%s makes %v, want %v", file, got, want)
		}
		if !strings.Contains(m.notes, "coppice ws create") {
			t.Errorf("%s: the notes are %q", file, m.notes)
		}
	}
	files, err := render(t, values(t, "small.yaml", "runner: {enabled: false}"))
	if err != nil {
		t.Fatal(err)
	}
	if m := decode(t, files); m.objects["DaemonSet/trial-coppice-runner"] != nil {
		t.Error("runners that are off are made")
	}
}

// TestSchemaRefuses renders what cannot work.
func TestSchemaRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ values, says string }{
		"no database":                 {`database: {existingSecret: ""}`, "database"},
		"no cluster key":              {`clusterKey: {existingSecret: ""}`, "clusterKey"},
		"no administrator's key":      {`adminKey: {existingSecret: ""}`, "adminKey"},
		"no key for joining":          {`joinKey: {existingSecret: ""}`, "joinKey"},
		"neither TLS nor clear":       {`controller: {plainHTTP: false}`, "controller"},
		"an image of no version":      {`image: {runner: {tag: "", digest: ""}}`, "runner"},
		"the latest image":            {`image: {controller: {tag: latest}}`, "tag"},
		"runners everywhere":          {`runner: {nodeSelector: {coppice.dev/runner: null}}`, "nodeSelector"},
		"a relative directory":        {`runner: {dataDir: data}`, "dataDir"},
		"an unknown setting":          {`controller: {replica: 3}`, "replica"},
		"an unknown VMM":              {`runner: {vmm: firecracker}`, "vmm"},
		"a lease without unit":        {`controller: {runnerLease: "15"}`, "runnerLease"},
		"a store on a node's disk":    {`store: {url: "dir:/srv"}`, "store"},
		"a store without credentials": {`store: {url: "s3://bucket"}`, "existingSecret"},
		"a Vault in clear":            {`vault: {address: "http://vault.example.com", existingSecret: a}`, "address"},
		"a Vault for nobody":          {`vault: {existingSecret: ""}`, "vault"},
		"authorities in no secret":    {`vault: {existingSecret: "", kubernetesRole: a, ca: true}`, "vault"},
		"one prefix for all projects": {`vault: {prefix: secret/coppice/}`, "prefix"},
		"an ingress to nowhere":       {`controller: {ingress: {enabled: true}}`, "ingress"},
	} {
		if _, err := render(t, values(t, "small.yaml", c.values)); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestPodsAreWhole checks references within each pod, which Kubernetes' types do not.
func TestPodsAreWhole(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, m manifests) {
		t.Helper()
		for name, pod := range m.pods() {
			if pod.Spec.AutomountServiceAccountToken == nil || *pod.Spec.AutomountServiceAccountToken {
				t.Errorf("%s has a token for Kubernetes' API, which nothing here uses", name)
			}
			volumes, used := map[string]bool{}, map[string]bool{}
			for _, v := range pod.Spec.Volumes {
				if volumes[v.Name] {
					t.Errorf("%s has the volume %s twice", name, v.Name)
				}
				volumes[v.Name] = true
			}
			for _, c := range containers(pod.Spec) {
				if image := c.Image; !strings.HasPrefix(image, "registry.example.com/coppice-") || !strings.ContainsAny(image[len("registry.example.com/"):], ":@") {
					t.Errorf("%s, %s: image %q", name, c.Name, image)
				}
				ports := map[string]bool{}
				for _, p := range c.Ports {
					ports[p.Name] = true
				}
				for _, p := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
					if p != nil && p.HTTPGet != nil && p.HTTPGet.Port.StrVal != "" && !ports[p.HTTPGet.Port.StrVal] {
						t.Errorf("%s, %s: a probe asks port %q", name, c.Name, p.HTTPGet.Port.StrVal)
					}
				}
				for _, v := range c.VolumeMounts {
					used[v.Name] = true
					if !volumes[v.Name] {
						t.Errorf("%s, %s mounts %s, which is no volume", name, c.Name, v.Name)
					}
				}
			}
			if !maps.Equal(volumes, used) {
				t.Errorf("%s: volumes %v, mounted %v", name, slices.Sorted(maps.Keys(volumes)), slices.Sorted(maps.Keys(used)))
			}
		}
	})
}

func TestSelectorsMatch(t *testing.T) {
	t.Parallel()
	within := func(selector, labels map[string]string) bool {
		for k, v := range selector {
			if labels[k] != v {
				return false
			}
		}
		return len(selector) > 0
	}
	each(t, func(t *testing.T, m manifests) {
		t.Helper()
		d := m.objects["Deployment/trial-coppice-controller"].(*appsv1.Deployment)
		r := m.objects["DaemonSet/trial-coppice-runner"].(*appsv1.DaemonSet)
		labels := d.Spec.Template.Labels
		if !within(d.Spec.Selector.MatchLabels, labels) || !within(r.Spec.Selector.MatchLabels, r.Spec.Template.Labels) || within(d.Spec.Selector.MatchLabels, r.Spec.Template.Labels) {
			t.Errorf("selectors %v, %v", d.Spec.Selector, r.Spec.Selector)
		}
		ports := map[string]bool{}
		for _, p := range d.Spec.Template.Spec.Containers[0].Ports {
			ports[p.Name] = true
		}
		for name, o := range m.objects {
			switch o := o.(type) {
			case *corev1.Service:
				if !within(o.Spec.Selector, labels) || !ports[o.Spec.Ports[0].TargetPort.StrVal] {
					t.Errorf("%s selects %v, port %v", name, o.Spec.Selector, o.Spec.Ports)
				}
			case *policyv1.PodDisruptionBudget:
				if !within(o.Spec.Selector.MatchLabels, labels) {
					t.Errorf("%s selects %v", name, o.Spec.Selector)
				}
			case *networkingv1.Ingress:
				if b := o.Spec.Rules[0].HTTP.Paths[0].Backend.Service; m.objects["Service/"+b.Name] == nil || b.Port.Name != "api" {
					t.Errorf("%s leads to %+v", name, b)
				}
			}
		}
	})
}

// TestControllerPods checks that they have no privilege, and that a runner can join while there is none.
func TestControllerPods(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, m manifests) {
		t.Helper()
		for name, pod := range m.pods() {
			if strings.HasPrefix(name, "DaemonSet/") {
				continue
			}
			s := pod.Spec.SecurityContext
			if s == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot || s.SeccompProfile == nil || pod.Spec.HostNetwork || pod.Spec.HostPID {
				t.Errorf("%s: %+v", name, s)
			}
			for _, c := range containers(pod.Spec) {
				s := c.SecurityContext
				if s == nil || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || s.Privileged != nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(s.Capabilities.Add) > 0 {
					t.Errorf("%s, %s: %+v", name, c.Name, s)
				}
				if len(c.Resources.Requests) == 0 || len(c.Resources.Limits) == 0 {
					t.Errorf("%s, %s has no bounds: %+v", name, c.Name, c.Resources)
				}
			}
		}
		c := m.objects["Deployment/trial-coppice-controller"].(*appsv1.Deployment).Spec.Template.Spec.Containers[0]
		for _, p := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
			if p == nil || p.HTTPGet.Path != "/healthz" {
				t.Errorf("a probe asks %+v; /readyz would keep the first runner out", p)
			}
		}
	})
}

// TestRunnerPods checks what lets VMs outlive the pod, and that no container of a node has the administrator's key: the one that makes join
// tokens has a key for that alone.
func TestRunnerPods(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, m manifests) {
		t.Helper()
		pod := m.objects["DaemonSet/trial-coppice-runner"].(*appsv1.DaemonSet).Spec.Template.Spec
		runner := pod.Containers[0]
		if !pod.HostPID || !pod.HostNetwork || pod.DNSPolicy != corev1.DNSClusterFirstWithHostNet || !*runner.SecurityContext.Privileged {
			t.Errorf("host's processes %v, network %v, %s, %+v", pod.HostPID, pod.HostNetwork, pod.DNSPolicy, runner.SecurityContext)
		}
		host := map[string]string{}
		for _, v := range pod.Volumes {
			if v.HostPath != nil {
				host[v.Name] = v.HostPath.Path
			}
		}
		for path, both := range map[string]bool{"/var/lib/coppice": true, "/run/netns": true, "/run/coppice": false, "/sys/fs/cgroup": false, "/var/lib/coppice-images": false} {
			i := slices.IndexFunc(runner.VolumeMounts, func(v corev1.VolumeMount) bool { return v.MountPath == path })
			if i < 0 || host[runner.VolumeMounts[i].Name] != path {
				t.Errorf("%s is not the node's: %+v", path, runner.VolumeMounts)
				continue
			}
			if p := runner.VolumeMounts[i].MountPropagation; both != (p != nil && *p == corev1.MountPropagationBidirectional) {
				t.Errorf("mounts in %s go %v", path, p)
			}
		}
		for _, c := range containers(pod) {
			has := slices.ContainsFunc(c.VolumeMounts, func(v corev1.VolumeMount) bool { return v.Name == "join-key" })
			if has != (c.Name == "join") {
				t.Errorf("%s has the key for joining: %v", c.Name, has)
			}
		}
		for _, v := range pod.Volumes {
			if v.Secret != nil && v.Secret.SecretName == "coppice-admin-key" {
				t.Errorf("the node has the administrator's key, as the volume %s", v.Name)
			}
		}
	})
}

// TestChartStartsCoppice checks arguments and variables of every container, and starts the servers with them.
func TestChartStartsCoppice(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, m manifests) {
		t.Helper()
		checked := map[string]start{}
		for name, pod := range m.pods() {
			for _, c := range containers(pod.Spec) {
				s := start{fmt.Sprintf("%s, %s", name, c.Name), c.Args, map[string]string{}}
				for _, e := range c.Env {
					s.env[e.Name] = e.Value
				}
				if len(c.Command) > 0 {
					continue // not coppice's own entry point
				}
				s.known(t)
				checked[c.Name] = s
			}
		}
		for _, name := range []string{"controller", "join", "runner"} {
			if _, ok := checked[name]; !ok {
				t.Errorf("no container %s runs coppice", name)
			}
		}
		database := filepath.Join(t.TempDir(), "database")
		if err := os.WriteFile(database, []byte(unreachable), 0o600); err != nil {
			t.Fatal(err)
		}
		checked["controller"].refused(t, map[string]string{"COPPICE_DATABASE_FILE": database, "COPPICE_DATABASE_WAIT": "1ms"}, "the database (PostgreSQL) cannot be reached")
		if migrate, ok := checked["migrate"]; ok {
			migrate.refused(t, map[string]string{"COPPICE_DATABASE_FILE": database, "COPPICE_DATABASE_WAIT": "1ms"}, "the database cannot be reached")
		}
		checked["runner"].refused(t, map[string]string{"COPPICE_DATA_DIR": t.TempDir(), "COPPICE_IMAGES_DIR": t.TempDir(), "COPPICE_ACCEL": "tcg", "COPPICE_VMM": "qemu"}, needsToken())
	})
}

// TestHelmSecrets: docs/OPERATIONS.md makes every secret that its values name, with the keys that the chart mounts.
func TestHelmSecrets(t *testing.T) {
	t.Parallel()
	_, text, _ := strings.Cut(readFile(t, root+"/docs/OPERATIONS.md"), "\n## Kubernetes\n")
	text, _, _ = strings.Cut(text, "\n## ")
	_, values, ok := strings.Cut(text, "```yaml\n")
	values, _, _ = strings.Cut(values, "```")
	if !ok || values == "" {
		t.Fatal("OPERATIONS has no values, as this test knows them")
	}
	made := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^kubectl -n coppice create secret generic (\S+) (.*)$`).FindAllStringSubmatch(text, -1) {
		made[m[1]] = m[2]
	}
	named := regexp.MustCompile(`existingSecret: ([a-z-]+)`).FindAllStringSubmatch(values, -1)
	if len(named) < 8 {
		t.Fatalf("the values name %d secrets", len(named))
	}
	keys := map[string][]string{
		"coppice-database": {"database"}, "coppice-cluster-key": {"cluster.key"}, "coppice-admin-key": {"api.key"}, "coppice-join-key": {"join.key"},
		"coppice-master-key": {"master.key"}, "coppice-store": {"access-key", "secret-key"}, "coppice-vault": {"role-id", "secret-id"},
		"coppice-api-tls": {"tls.crt", "tls.key", "ca.crt"},
	}
	for _, m := range named {
		if keys[m[1]] == nil {
			t.Errorf("this test knows no keys of the secret %s", m[1])
		}
		for _, key := range keys[m[1]] {
			if !regexp.MustCompile(`--from-(literal|file)=` + regexp.QuoteMeta(key) + `\b`).MatchString(made[m[1]]) {
				t.Errorf("no command makes the key %s of the secret %s, which the values name", key, m[1])
			}
		}
	}
}
