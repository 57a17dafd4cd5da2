package deploytest

import (
	"context"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

// compose loads docker-compose.yml as `docker compose` does, with deploy/.env.example and what is added to it.
func compose(ctx context.Context, more ...string) (*types.Project, error) {
	options, err := cli.NewProjectOptions([]string{root + "/deploy/docker-compose.yml"},
		cli.WithEnv(more), cli.WithEnvFiles(root+"/deploy/.env.example"), cli.WithDotEnv)
	if err != nil {
		return nil, err
	}
	return options.LoadProject(ctx)
}

func project(t *testing.T) *types.Project {
	t.Helper()
	p, err := compose(t.Context(), "POSTGRES_PASSWORD=p", "S3_SECRET_KEY=s")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestComposeWantsSecrets(t *testing.T) {
	t.Parallel()
	for name, env := range map[string][]string{
		"POSTGRES_PASSWORD": {"S3_SECRET_KEY=s"},
		"S3_SECRET_KEY":     {"POSTGRES_PASSWORD=p"},
	} {
		if _, err := compose(t.Context(), env...); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

// TestComposeServices checks what every service has, and that the ones that only run once are waited for as such.
func TestComposeServices(t *testing.T) {
	t.Parallel()
	p := project(t)
	if got, want := p.ServiceNames(), []string{"bucket", "controller", "image", "join", "master-key", "postgres", "runner", "s3"}; !slices.Equal(got, want) {
		t.Errorf("services %v, want %v", got, want)
	}
	once := []string{"bucket", "image", "join", "master-key"}
	for name, s := range p.Services {
		if s.Privileged || s.Pid == "host" || s.NetworkMode == "host" {
			t.Errorf("%s is privileged, or has the host's processes or network", name)
		}
		if s.Image == "" || !strings.Contains(s.Image, ":") || strings.HasSuffix(s.Image, ":latest") {
			t.Errorf("%s has the image %q, which names no version", name, s.Image)
		}
		if slices.Contains(once, name) {
			if s.Restart != "no" || s.HealthCheck == nil || !s.HealthCheck.Disable {
				t.Errorf("%s runs once: restart %q, health check %+v", name, s.Restart, s.HealthCheck)
			}
		} else if s.Restart != "unless-stopped" || s.HealthCheck == nil || len(s.HealthCheck.Test) < 2 {
			t.Errorf("%s stays up: restart %q, health check %+v", name, s.Restart, s.HealthCheck)
		}
		for on, d := range s.DependsOn {
			want := types.ServiceConditionHealthy
			if slices.Contains(once, on) {
				want = types.ServiceConditionCompletedSuccessfully
			}
			if d.Condition != want {
				t.Errorf("%s waits until %s is %s, want %s", name, on, d.Condition, want)
			}
		}
		if name != "postgres" && !slices.Equal(s.CapDrop, []string{"ALL"}) {
			t.Errorf("%s drops %v, want all capabilities", name, s.CapDrop)
		}
		for _, port := range s.Ports {
			if port.HostIP != "127.0.0.1" {
				t.Errorf("%s is published at %s:%s, beyond this machine", name, port.HostIP, port.Published)
			}
		}
		for _, v := range s.Volumes {
			if v.Type != types.VolumeTypeVolume || p.Volumes[v.Source].Name == "" {
				t.Errorf("%s mounts %s on %s: want a named volume", name, v.Source, v.Target)
			}
		}
	}
	if got := slices.Sorted(maps.Keys(p.Services["runner"].Networks)); slices.Contains(got, "database") {
		t.Errorf("the runner reaches the database: %v", got)
	}
}

// TestComposeBuilds: an image that several services built would be left without a name by all but the last.
func TestComposeBuilds(t *testing.T) {
	t.Parallel()
	builds := map[string][]string{}
	for name, s := range project(t).Services {
		if s.Build != nil {
			builds[s.Image] = append(builds[s.Image], name)
		}
	}
	if want := map[string][]string{"coppice-controller:dev": {"controller"}, "coppice-runner:dev": {"runner"}}; !maps.EqualFunc(builds, want, slices.Equal) {
		t.Errorf("images are built by %v, want %v", builds, want)
	}
}

// TestComposeForwards: the ports that the runner gives to tenants are those that the engine publishes, at the address that the runner names.
func TestComposeForwards(t *testing.T) {
	t.Parallel()
	r := project(t).Services["runner"]
	first, last, _ := strings.Cut(*r.Environment["COPPICE_FORWARD_PORTS"], "-")
	low, err1 := strconv.Atoi(first)
	high, err2 := strconv.Atoi(last)
	if err := errors.Join(err1, err2); err != nil || len(r.Ports) != high-low+1 {
		t.Fatalf("the runner gives ports %s-%s, and %d are published: %v", first, last, len(r.Ports), err)
	}
	for i, port := range r.Ports {
		if want := strconv.Itoa(low + i); port.HostIP != *r.Environment["COPPICE_FORWARD_ADDRESS"] || port.Published != want || strconv.Itoa(int(port.Target)) != want {
			t.Errorf("%s:%s is published for %d", port.HostIP, port.Published, port.Target)
		}
	}
	if *r.Environment["COPPICE_FORWARD_BIND"] != "0.0.0.0" {
		t.Error("the engine cannot reach what the runner forwards")
	}
}

// TestComposeRunner holds the list of what a runner in a container gets.
func TestComposeRunner(t *testing.T) {
	t.Parallel()
	r := project(t).Services["runner"]
	if !slices.Equal(r.CapAdd, capabilities) {
		t.Errorf("capabilities %v, want %v", r.CapAdd, capabilities)
	}
	if len(r.Devices) != 2 || r.Devices[0].Source != "/dev/net/tun" || r.Devices[1].Source != "/dev/fuse" {
		t.Errorf("devices %+v, want those of tap and FUSE", r.Devices)
	}
	if want := []string{"apparmor=unconfined", "systempaths=unconfined", "no-new-privileges:true"}; !slices.Equal(r.SecurityOpt, want) {
		t.Errorf("security options %v, want %v", r.SecurityOpt, want)
	}
	if r.Ulimits["nofile"] != nil {
		t.Error("the runner wants a number of open files, which an engine with fewer refuses")
	}
	if !slices.Contains(r.Command, "--stop-vms") {
		t.Errorf("%v leaves VMs in a container that ends with them", r.Command)
	}
}

// TestComposeJoins: what makes join tokens has a key for that alone, from the controller, and no volume with the administrator's.
func TestComposeJoins(t *testing.T) {
	t.Parallel()
	p := project(t)
	mounted := func(service, target string) string {
		for _, v := range p.Services[service].Volumes {
			if v.Target == target {
				return v.Source
			}
		}
		return ""
	}
	if source := mounted("join", "/join-key"); source == "" || source != mounted("controller", "/var/lib/coppice-join") {
		t.Errorf("the key for joining is in %q", source)
	}
	for _, service := range []string{"join", "runner", "image"} {
		for _, v := range p.Services[service].Volumes {
			if v.Source == mounted("controller", "/var/lib/coppice-controller") {
				t.Errorf("%s has the administrator's key at %s", service, v.Target)
			}
		}
	}
	if file := p.Services["controller"].Environment["COPPICE_JOIN_KEY_FILE"]; file == nil || *file != "/var/lib/coppice-join/join.key" {
		t.Error("the controller makes no key for joining")
	}
}

func TestComposeStartsCoppice(t *testing.T) {
	t.Parallel()
	p := project(t)
	servers := map[string]start{}
	for _, name := range []string{"controller", "join", "runner"} {
		s := start{"docker-compose.yml, " + name, p.Services[name].Command, map[string]string{}}
		for key, value := range p.Services[name].Environment {
			if value != nil {
				s.env[key] = *value
			}
		}
		s.known(t)
		servers[name] = s
	}
	servers["controller"].refused(t, map[string]string{"COPPICE_DATABASE": unreachable, "COPPICE_DATABASE_WAIT": "1ms"}, "the database (PostgreSQL) cannot be reached")
	servers["runner"].refused(t, map[string]string{"COPPICE_DATA_DIR": t.TempDir(), "COPPICE_IMAGES_DIR": t.TempDir()}, needsToken())
}

// TestEnvExample keeps every variable that the compose file asks for in deploy/.env.example, and no other.
func TestEnvExample(t *testing.T) {
	t.Parallel()
	given := map[string]bool{}
	for line := range strings.Lines(readFile(t, root+"/deploy/.env.example")) {
		if key, _, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(key, "#") {
			given[key] = true
		}
	}
	asked := map[string]bool{}
	for _, rest := range strings.Split(readFile(t, root+"/deploy/docker-compose.yml"), "${")[1:] {
		asked[rest[:strings.IndexAny(rest, ":}")]] = true
	}
	if !maps.Equal(given, asked) {
		t.Errorf(".env.example has %v, docker-compose.yml asks for %v", slices.Sorted(maps.Keys(given)), slices.Sorted(maps.Keys(asked)))
	}
	if ignored := readFile(t, filepath.Join(root, ".gitignore")); !strings.Contains(ignored, "\n/deploy/.env\n") {
		t.Error(".gitignore does not keep deploy/.env, with its secrets, out of the tree")
	}
}

// copied makes a directory with some files of the tree.
func copied(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(readFile(t, filepath.Join(root, name))), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// fakeDocker answers what compose-up asks before it does anything. The engine itself is in scripts/test-compose.
const fakeDocker = `#!/bin/sh
case "$1 $2" in
"compose version") echo "$FAKE_COMPOSE"; [ -n "$FAKE_COMPOSE" ] ;;
"info ") [ -n "$FAKE_ENGINE" ] ;;
"volume ls") echo "$FAKE_VOLUME" ;;
*) echo "docker $*"; exit 9 ;;
esac
`

// TestComposeUpRefuses: what compose-up lacks is said before it makes secrets or builds anything. New secrets are not made beside an old database.
func TestComposeUpRefuses(t *testing.T) {
	t.Parallel()
	for want, env := range map[string][]string{
		"docker has no Compose plugin; install Compose 2.15 or later":                 {"FAKE_COMPOSE="},
		"Compose 2.14.2 is too old":                                                   {"FAKE_COMPOSE=v2.14.2"},
		"the docker engine does not answer":                                           {"FAKE_COMPOSE=2.15.0"},
		"the volume coppice_postgres has a database with the password that was in it": {"FAKE_COMPOSE=2.40.3", "FAKE_ENGINE=1", "FAKE_VOLUME=coppice_postgres"},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			dir := copied(t, "scripts/compose-env", "scripts/compose-up", "deploy/.env.example")
			if err := os.WriteFile(filepath.Join(dir, "docker"), []byte(fakeDocker), 0o700); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), "bash", filepath.Join(dir, "scripts/compose-up"))
			cmd.Env = append(append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH")), env...)
			out, err := cmd.CombinedOutput()
			if err == nil || !strings.Contains(string(out), want) {
				t.Errorf("%v, want %q in\n%s", err, want, out)
			}
			if _, err := os.Stat(filepath.Join(dir, "deploy/.env")); err == nil {
				t.Error("it made deploy/.env")
			}
		})
	}
}

// TestComposeEnv makes the settings as `make compose-up` does, in a copy: whole, secret, and never twice.
func TestComposeEnv(t *testing.T) {
	t.Parallel()
	dir := copied(t, "scripts/compose-env", "deploy/.env.example")
	made := make([]string, 2)
	for i := range made {
		if out, err := exec.CommandContext(t.Context(), "bash", filepath.Join(dir, "scripts/compose-env")).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		made[i] = readFile(t, filepath.Join(dir, "deploy/.env"))
	}
	if made[0] != made[1] {
		t.Errorf("the second time made other settings:\n%s%s", made[0], made[1])
	}
	if !regexp.MustCompile(`(?m)^POSTGRES_PASSWORD=[0-9a-f]{48}$`).MatchString(made[0]) || !regexp.MustCompile(`(?m)^S3_SECRET_KEY=[0-9a-f]{48}$`).MatchString(made[0]) {
		t.Errorf("without secrets:\n%s", made[0])
	}
	if info, err := os.Stat(filepath.Join(dir, "deploy/.env")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}
