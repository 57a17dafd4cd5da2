package deploytest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// pin runs deploy/pin-images on a copy of deploy/.env.example, with a program in the place of crane that prints an answer.
func pin(t *testing.T, answer string) (env, output string, err error) {
	t.Helper()
	dir := t.TempDir()
	crane := "#!/bin/sh\necho \"$@\" >>" + filepath.Join(dir, "asked") + "\nprintf '" + answer + "'\n"
	if err := os.WriteFile(filepath.Join(dir, "crane"), []byte(crane), 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, ".env")
	if err := os.WriteFile(file, []byte(readFile(t, root+"/deploy/.env.example")), 0o600); err != nil {
		t.Fatal(err)
	}
	script, err := filepath.Abs(root + "/deploy/pin-images")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // what is pinned is pinned again
		cmd := exec.CommandContext(t.Context(), script, file)
		cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH")}
		out, failed := cmd.CombinedOutput()
		if output, err = string(out), failed; err != nil {
			break
		}
	}
	left, _ := filepath.Glob(file + ".*")
	if len(left) > 0 {
		t.Errorf("%q are left", left)
	}
	return readFile(t, file), output, err
}

// TestPinImages: every image of others gets its digest beside its tag, whatever else is in the file stays, and what is no digest is
// refused and changes nothing.
func TestPinImages(t *testing.T) {
	t.Parallel()
	digest := "sha256:" + strings.Repeat("0f", 32)
	env, out, err := pin(t, digest+`\n`)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	pinned := regexp.MustCompile(`(?m)^([A-Z0-9_]+_IMAGE)=(\S+)@` + digest + `$`)
	if got := pinned.ReplaceAllString(env, "$1=$2"); got != readFile(t, root+"/deploy/.env.example") {
		t.Errorf("what was pinned is\n%s", env)
	}
	if n := len(pinned.FindAllString(env, -1)); n != 4 {
		t.Errorf("%d images were pinned, want 4", n)
	}
	for name, answer := range map[string]string{"nothing": "", "an error": "MANIFEST_UNKNOWN", "more than a digest": digest + `\nPOSTGRES_PASSWORD=x\n`} {
		if env, out, err := pin(t, answer); err == nil || env != readFile(t, root+"/deploy/.env.example") {
			t.Errorf("%s: %v, %s\n%s", name, err, out, env)
		}
	}
}

// TestImagesOfOthers: each has a tag in .env.example that is no moving one, and the compose file and the Dockerfile default to the
// same.
func TestImagesOfOthers(t *testing.T) {
	t.Parallel()
	env, compose, dockerfile := readFile(t, root+"/deploy/.env.example"), readFile(t, root+"/deploy/docker-compose.yml"), readFile(t, root+"/deploy/docker/Dockerfile")
	for _, name := range []string{"POSTGRES_IMAGE", "S3_IMAGE", "GO_IMAGE", "BASE_IMAGE"} {
		m := regexp.MustCompile(`(?m)^` + name + `=(\S+:\S+)$`).FindStringSubmatch(env)
		if m == nil || strings.HasSuffix(m[1], ":latest") {
			t.Errorf(".env.example has no tag for %s", name)
			continue
		}
		if !strings.Contains(compose, "${"+name+":-"+m[1]+"}") {
			t.Errorf("docker-compose.yml does not default %s to %s", name, m[1])
		}
		if strings.HasPrefix(name, "GO") || strings.HasPrefix(name, "BASE") {
			if !strings.Contains(dockerfile, "ARG "+name+"="+m[1]+"\n") {
				t.Errorf("the Dockerfile does not default %s to %s", name, m[1])
			}
		}
	}
}
