package assemble

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/ebpfllm/ebpfllm/internal/probe"
)

// The kernel side gives on a candidate's request line up to its line feed.
func TestACandidatesRequestLineIsRead(t *testing.T) {
	for line, want := range map[string]string{
		"POST /v1/chat/completions HTTP/1.1\r":   "/v1/chat/completions",
		"POST /api/chat?secret=1 HTTP/1.0":       "/api/chat",
		"GET /v1/models HTTP/1.1\r\n":            "/v1/models",
		"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r": "",
		"POST /v1/chat/completions, cut off":     "",
	} {
		asked := ""
		a := New(Config{OnCandidate: func(pid uint32, path string) {
			assert.EqualValues(t, 7, pid)
			asked = path
		}}, nil)
		bytes := []byte(line)
		a.Handle(&probe.RequestHead{PID: 7, Flags: probe.HeadFlags{Candidate: true}, Bytes: bytes})
		assert.Equal(t, want, asked, "%q", line)
		assert.Equal(t, make([]byte, len(line)), bytes, "header bytes are wiped")
	}
}
