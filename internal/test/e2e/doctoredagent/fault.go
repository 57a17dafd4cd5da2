//go:build linux

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

const faultVariable = "COPPICE_FAULT"

// wrap stands before the agent's routes.
func wrap(next http.Handler) http.Handler {
	var refuse atomic.Bool
	var bad badAnswers
	mux := http.NewServeMux()
	mux.Handle("/", next)
	mux.HandleFunc("POST "+guestapi.PathReseal, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var req guestapi.ResealRequest
		if err == nil {
			err = json.Unmarshal(body, &req)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		fault, step, _ := strings.Cut(req.Env[faultVariable], ":")
		refuse.Store(fault == "no-release")
		if fault == "answers" {
			bad.arm(step)
		}
		if bad.gives(w, r) {
			return
		}
		if before(w, r, fault) {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		answer := httptest.NewRecorder()
		next.ServeHTTP(answer, r)
		switch fault {
		case "exit":
			os.Exit(3)
		case "replay":
			r.Body = io.NopCloser(bytes.NewReader(body))
			answer = httptest.NewRecorder()
			next.ServeHTTP(answer, r)
		}
		alter(w, answer, req, fault, step)
	})
	mux.HandleFunc("POST "+guestapi.PathRelease, func(w http.ResponseWriter, r *http.Request) {
		if refuse.Load() {
			http.Error(w, `{"category":"internal","code":"INTERNAL","message":"no"}`, http.StatusInternalServerError)
			return
		}
		next.ServeHTTP(w, r)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == guestapi.PathReseal || !bad.gives(w, r) { // its own handler arms the bad answers first
			mux.ServeHTTP(w, r)
		}
	})
}

// before does what comes before the reseal, and reports whether there is none.
func before(w http.ResponseWriter, r *http.Request, fault string) (done bool) {
	var err error
	switch fault {
	case "deaf-kernel", "forged-draws":
		err = filter(unix.SYS_IOCTL, []uint32{unix.RNDADDENTROPY, unix.RNDRESEEDCRNG}, unix.SECCOMP_RET_ERRNO)
	case "no-reseed":
		err = filter(unix.SYS_IOCTL, []uint32{unix.RNDRESEEDCRNG}, unix.SECCOMP_RET_ERRNO|uint32(unix.EPERM))
	case "killed":
		err = filter(unix.SYS_IOCTL, []uint32{unix.RNDRESEEDCRNG}, unix.SECCOMP_RET_KILL_PROCESS)
	case "deaf-hostname":
		err = filter(unix.SYS_SETHOSTNAME, nil, unix.SECCOMP_RET_ERRNO)
	case "hang":
		<-r.Context().Done()
		return true
	case "error":
		http.Error(w, `{"category":"internal","code":"INTERNAL","message":"\u001b[31mno"}`, http.StatusInternalServerError)
		return true
	case "flood":
		w.WriteHeader(http.StatusOK)
		for err := error(nil); err == nil; {
			_, err = w.Write(make([]byte, 64<<10))
		}
		return true
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
	return err != nil
}

// alter passes the answer on, changed as the fault wants it.
func alter(w http.ResponseWriter, answer *httptest.ResponseRecorder, req guestapi.ResealRequest, fault, step string) {
	var report core.ResealReport
	if answer.Code == http.StatusOK && json.Unmarshal(answer.Body.Bytes(), &report) == nil {
		report.Steps = altered(report.Steps, req, fault, step)
		if fault == "other-generation" {
			report.Generation = "00000000-0000-4000-8000-000000000000"
		}
		answer.Body.Reset()
		_ = json.NewEncoder(answer.Body).Encode(report)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(answer.Code)
	_, _ = w.Write(answer.Body.Bytes())
}

func altered(steps []core.ResealStep, req guestapi.ResealRequest, fault, step string) []core.ResealStep {
	var out []core.ResealStep
	for _, s := range steps {
		switch {
		case s.Name == step && fault == "missing":
			continue
		case s.Name == step && fault == "silent":
			s.Evidence = nil
		case s.Name == step && fault == "skipped":
			s.Status, s.Evidence = core.ResealSkipped, map[string]string{guestapi.EvidenceReason: "not today"}
		case s.Name == guestapi.StepEntropy && (fault == "forged-draws" || fault == "same-draws"):
			for i := range guestapi.EvidenceDraws {
				seed := req.Entropy
				if fault == "forged-draws" {
					seed = append([]byte{byte(i)}, req.Entropy...)
				}
				sum := sha256.Sum256(seed)
				s.Evidence[fmt.Sprintf(guestapi.EvidenceDrawKey, i)] = hex.EncodeToString(sum[:16])
			}
		}
		out = append(out, s)
	}
	return out
}
