package router

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// failure is an answer in place of a guest's. E2B's clients know the two messages.
type failure struct {
	SandboxID string `json:"sandboxId"`
	Message   string `json:"message"`
	Port      int    `json:"port,omitempty"`
	Code      int    `json:"code"`
}

// writeAbsent is the answer where there is no preview for the caller, or no machine.
func writeAbsent(w http.ResponseWriter, q *http.Request, t sandboxhost.Target) {
	writeFailure(w, q, failure{SandboxID: t.ID, Message: "The sandbox was not found"},
		"There is no such preview, or its link is not valid any more. 'coppice ws previews' lists the present links.")
}

// writeClosed is the answer where nothing listens at a port.
func writeClosed(w http.ResponseWriter, q *http.Request, t sandboxhost.Target) {
	writeFailure(w, q, failure{SandboxID: t.ID, Message: "The sandbox is running but port is not open", Port: t.Port},
		"The workspace runs, but no program in it listens on this port.")
}

func writeFailure(w http.ResponseWriter, q *http.Request, f failure, page string) {
	f.Code = http.StatusBadGateway
	if strings.Contains(q.Header.Get("Accept"), "text/html") {
		writeText(w, f.Code, page)
		return
	}
	b, err := json.Marshal(f)
	if err != nil {
		b = []byte(`{"code":502}`)
	}
	write(w, f.Code, "application/json", append(b, '\n'))
}

func writeText(w http.ResponseWriter, status int, text string) {
	write(w, status, "text/plain; charset=utf-8", []byte(text+"\n"))
}

// patience bounds the time that a client may take to send the rest of a request that was answered already.
const patience = 5 * time.Second

func write(w http.ResponseWriter, status int, kind string, body []byte) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(patience)) // net/http reads the rest of the body before it answers
	h := w.Header()
	h.Set("Content-Type", kind)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may have gone
}
