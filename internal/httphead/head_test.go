package httphead

import (
	"net/http"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	parent  = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	okHead  = "POST /v1/chat/completions HTTP/1.1\r\nHost: llm.example:8080\r\n"
	okReply = "HTTP/1.1 200 OK\r\n"
)

func TestParseRequestKeepsOnlyWhatMayBeExported(t *testing.T) {
	raw := "POST /v1/chat/completions?api_key=SECRET HTTP/1.1\r\n" +
		"hOsT: user.example:8443\r\n" +
		"AUTHORIZATION: Bearer SECRET\r\n" +
		"tRaCePaReNt:  " + parent + " \r\n" +
		"tracestate: a=1 , b=2\r\nTraceState: c=3\r\n" +
		"Content-Length: 12\r\nExpect: 100-Continue\r\n\r\n{\"SECRET\":1}"
	h, f, err := ParseRequest([]byte(raw))
	require.NoError(t, err)
	assert.Equal(t, Head{
		Method: "POST", Path: "/v1/chat/completions", Host: "user.example", Proto: "1.1",
		TraceParent: parent, TraceState: "a=1,b=2,c=3",
		TraceID:    [16]byte{0x0a, 0xf7, 0x65, 0x19, 0x16, 0xcd, 0x43, 0xdd, 0x84, 0x48, 0xeb, 0x21, 0x1c, 0x80, 0x31, 0x9c},
		ParentID:   [8]byte{0xb7, 0xad, 0x6b, 0x71, 0x69, 0x20, 0x33, 0x31},
		TraceFlags: 1,
	}, h)
	assert.Equal(t, Framing{HeadBytes: len(raw) - 12, ContentLength: 12, Expect100: true}, f)
}

func TestParseRequest(t *testing.T) {
	tests := []struct {
		name, raw, reason string
		method, path      string
		host              string
		framing           Framing
	}{
		{name: "no body", raw: "GET / HTTP/1.1\r\nHost: a\r\n\r\n", method: "GET", path: "/", host: "a", framing: Framing{HeadBytes: 27}},
		{name: "bare newlines", raw: "GET /x HTTP/1.1\nHost: a\n\nrest", method: "GET", path: "/x", host: "a", framing: Framing{HeadBytes: 25}},
		{name: "empty lines before it", raw: "\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", method: "GET", path: "/", host: "a", framing: Framing{HeadBytes: 31}},
		{name: "1.0 closes", raw: "GET / HTTP/1.0\r\n\r\n", method: "GET", path: "/", framing: Framing{HeadBytes: 18, Close: true}},
		{name: "chunked", raw: okHead + "Transfer-Encoding: chunked\r\n\r\n", method: "POST", path: "/v1/chat/completions", host: "llm.example", framing: Framing{HeadBytes: 90, ContentLength: -1, Chunked: true}},
		{name: "absolute target", raw: "GET http://u:p@h.example/a%20b?c#d HTTP/1.1\r\nHost: other\r\n\r\n", method: "GET", path: "/a%20b", host: "h.example", framing: Framing{HeadBytes: 60}},
		{name: "asterisk", raw: "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", method: "OPTIONS", path: "*", host: "a", framing: Framing{HeadBytes: 31}},
		{name: "connect has no path", raw: "CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\n", method: "CONNECT", host: "h", framing: Framing{HeadBytes: 39}},
		{name: "IPv6 host", raw: "GET / HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n", method: "GET", path: "/", host: "::1", framing: Framing{HeadBytes: 36}},
		{name: "unknown method", raw: "BREW / HTTP/1.1\r\nHost: a\r\n\r\n", method: "_OTHER", path: "/", host: "a", framing: Framing{HeadBytes: 28}},
		{name: "lower-case method is another method", raw: "get / HTTP/1.1\r\nHost: a\r\n\r\n", method: "_OTHER", path: "/", host: "a", framing: Framing{HeadBytes: 27}},
		{name: "long path is cut", raw: "GET /" + strings.Repeat("p", 999) + "?q HTTP/1.1\r\nHost: a\r\n\r\n", method: "GET", path: "/" + strings.Repeat("p", 255), host: "a", framing: Framing{HeadBytes: 1028}},
		{name: "path that is no UTF-8", raw: "GET /\xff\x80 HTTP/1.1\r\nHost: a\r\n\r\n", method: "GET", path: "/%FF%80", host: "a", framing: Framing{HeadBytes: 29}},
		{name: "long host is dropped", raw: "GET / HTTP/1.1\r\nHost: " + strings.Repeat("h", 300) + "\r\n\r\n", method: "GET", path: "/", framing: Framing{HeadBytes: 326}},
		{name: "truncated in the headers", raw: okHead + "Cookie: aaaaaaaa", method: "POST", path: "/v1/chat/completions", host: "llm.example", framing: Framing{HeadBytes: 76, ContentLength: -1, Truncated: true}},
		{name: "truncated in the start line", raw: "POST /v1/chat", reason: ReasonIncomplete},
		{name: "empty", raw: "", reason: ReasonIncomplete},
		{name: "TLS", raw: "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\r\n\r\n", reason: ReasonRequest},
		{name: "HTTP/2 preface", raw: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", reason: ReasonHTTP2},
		{name: "later version", raw: "GET / HTTP/3.0\r\n\r\n", reason: ReasonVersion},
		{name: "HTTP/1.9", raw: "GET / HTTP/1.9\r\nHost: a\r\n\r\n", reason: ReasonVersion},
		{name: "redis", raw: "*1\r\n$4\r\nPING\r\n\r\n", reason: ReasonRequest},
		{name: "conflicting lengths", raw: okHead + "Content-Length: 1\r\nContent-Length: 2\r\n\r\n", reason: ReasonRequest},
		{name: "negative length", raw: okHead + "Content-Length: -1\r\n\r\n", reason: ReasonRequest},
		{name: "header without colon", raw: okHead + "nonsense\r\n\r\n", reason: ReasonRequest},
		{name: "endless head", raw: okHead + strings.Repeat("A: b\r\n", MaxHead/6), reason: ReasonTooLong},
		{name: "endless line", raw: strings.Repeat("A", 2*MaxHead), reason: ReasonTooLong},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h, f, err := ParseRequest([]byte(tt.raw))
			if tt.reason != "" {
				require.Error(t, err)
				assert.Equal(t, tt.reason, Reason(err))
				assert.NotContains(t, err.Error(), "nonsense", "an error must not quote the bytes")
				return
			}
			require.NoError(t, err)
			assert.Equal(t, tt.method, h.Method)
			assert.Equal(t, tt.path, h.Path)
			assert.Equal(t, tt.host, h.Host)
			assert.Equal(t, tt.framing, f)
		})
	}
}

func TestTraceContextOfARequestNeverLosesTheRequest(t *testing.T) {
	const ids = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
	tests := []struct {
		name, headers, problem string
		flags                  byte
		state                  string
	}{
		{name: "sampled", headers: "traceparent: 00-" + ids + "-01\r\n", flags: 1},
		{name: "unsampled", headers: "traceparent: 00-" + ids + "-00\r\n"},
		{name: "random, and a flag of the future", headers: "traceparent: 00-" + ids + "-ff\r\n", flags: 3},
		{name: "later version", headers: "traceparent: cc-" + ids + "-01\r\n", flags: 1},
		{name: "later version with more", headers: "traceparent: cc-" + ids + "-01-what-next\r\n", flags: 1},
		{name: "later version with a stray end", headers: "traceparent: cc-" + ids + "-01.what\r\n", problem: ProblemMalformed},
		{name: "version 00 with more", headers: "traceparent: 00-" + ids + "-01-x\r\n", problem: ProblemMalformed},
		{name: "version ff", headers: "traceparent: ff-" + ids + "-01\r\n", problem: ProblemVersion},
		{name: "upper case", headers: "traceparent: 00-" + strings.ToUpper(ids) + "-01\r\n", problem: ProblemMalformed},
		{name: "not hexadecimal", headers: "traceparent: 00-" + strings.Replace(ids, "0af", "0xg", 1) + "-01\r\n", problem: ProblemMalformed},
		{name: "too short", headers: "traceparent: 00-" + ids + "-0\r\n", problem: ProblemMalformed},
		{name: "empty", headers: "traceparent:\r\n", problem: ProblemMalformed},
		{name: "wrong dashes", headers: "traceparent: 00_" + ids + "-01\r\n", problem: ProblemMalformed},
		{name: "zero trace id", headers: "traceparent: 00-" + strings.Repeat("0", 32) + "-b7ad6b7169203331-01\r\n", problem: ProblemZero},
		{name: "zero parent id", headers: "traceparent: 00-0af7651916cd43dd8448eb211c80319c-" + strings.Repeat("0", 16) + "-01\r\n", problem: ProblemZero},
		{name: "repeated", headers: "traceparent: 00-" + ids + "-01\r\nTraceparent: 00-" + ids + "-01\r\n", problem: ProblemRepeated},
		{name: "joined by a comma", headers: "traceparent: 00-" + ids + "-01,00-" + ids + "-01\r\n", problem: ProblemMalformed},
		{name: "enormous", headers: "traceparent: cc-" + ids + "-01-" + strings.Repeat("a", 20_000) + "\r\n", problem: ProblemTooLong},
		{name: "bytes that are no text", headers: "traceparent: cc-" + ids + "-01-\xff\xfe\r\n", problem: ProblemMalformed},

		{name: "tracestate kept", headers: "traceparent: 00-" + ids + "-01\r\ntracestate: vendor@sys=x:1,, ot=th:c\r\n", flags: 1, state: "vendor@sys=x:1,ot=th:c"},
		{name: "tracestate of 512 bytes kept", headers: "traceparent: 00-" + ids + "-01\r\ntracestate: a=" + strings.Repeat("x", 253) + ",b=" + strings.Repeat("y", 254) + "\r\n", flags: 1, state: "a=" + strings.Repeat("x", 253) + ",b=" + strings.Repeat("y", 254)},
		{name: "tracestate of 513 bytes dropped", headers: "traceparent: 00-" + ids + "-01\r\ntracestate: a=" + strings.Repeat("x", 254) + ",b=" + strings.Repeat("y", 254) + "\r\n", flags: 1, problem: ProblemTraceState},
		{name: "malformed tracestate dropped", headers: "traceparent: 00-" + ids + "-01\r\ntracestate: nonsense\r\n", flags: 1, problem: ProblemTraceState},
		{name: "tracestate of too many", headers: "traceparent: 00-" + ids + "-01\r\ntracestate: " + strings.Repeat("a=b,", 33) + "\r\n", flags: 1, problem: ProblemTraceState},
		{name: "tracestate alone", headers: "tracestate: a=b\r\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h, _, err := ParseRequest([]byte(okHead + tt.headers + "\r\n"))
			require.NoError(t, err)
			assert.Equal(t, "/v1/chat/completions", h.Path)
			assert.Equal(t, tt.problem, h.ContextProblem)
			linked := tt.headers != "tracestate: a=b\r\n" && (tt.problem == "" || tt.problem == ProblemTraceState)
			assert.Equal(t, linked, h.Linked())
			assert.Equal(t, linked, h.TraceID != [16]byte{})
			assert.Equal(t, linked, h.ParentID != [8]byte{})
			assert.Equal(t, tt.flags, h.TraceFlags)
			assert.Equal(t, tt.state, h.TraceState)
		})
	}
}

func TestParseResponse(t *testing.T) {
	tests := []struct {
		name, method, raw, reason string
		want                      Response
	}{
		{name: "length", raw: okReply + "Content-Length: 5\r\n\r\nhello", want: Response{HeadBytes: 38, Status: 200, ContentLength: 5}},
		{name: "no body", raw: okReply + "Content-Length: 0\r\n\r\n", want: Response{HeadBytes: 38, Status: 200}},
		{name: "event stream", raw: okReply + "content-type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n", want: Response{HeadBytes: 95, Status: 200, ContentLength: -1, Chunked: true, EventStream: true}},
		{name: "ndjson", raw: okReply + "Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n", want: Response{HeadBytes: 83, Status: 200, ContentLength: -1, Chunked: true, EventStream: true}},
		{name: "until close", raw: okReply + "\r\n", want: Response{HeadBytes: 19, Status: 200, ContentLength: -1, Close: true}},
		{name: "1.0", raw: "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n", want: Response{HeadBytes: 38, Status: 200, ContentLength: 5, Close: true}},
		{name: "close", raw: okReply + "Connection: close\r\nContent-Length: 5\r\n\r\n", want: Response{HeadBytes: 57, Status: 200, ContentLength: 5, Close: true}},
		{name: "HEAD has no body", method: "HEAD", raw: okReply + "Content-Length: 5\r\n\r\n", want: Response{HeadBytes: 38, Status: 200}},
		{name: "204 has no body", raw: "HTTP/1.1 204 No Content\r\n\r\n", want: Response{HeadBytes: 27, Status: 204}},
		{name: "304 has no body", raw: "HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", want: Response{HeadBytes: 48, Status: 304}},
		{name: "100", raw: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", want: Response{HeadBytes: 25, Status: 100, Informational: true}},
		{name: "101", raw: "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", want: Response{HeadBytes: 77, Status: 101, ContentLength: -1, Upgrade: true}},
		{name: "tunnel", method: "CONNECT", raw: okReply + "\r\n", want: Response{HeadBytes: 19, Status: 200, ContentLength: -1, Upgrade: true, Close: true}},
		{name: "truncated", raw: okReply + "Set-Cookie: aaa", want: Response{HeadBytes: 32, Status: 200, ContentLength: -1, Close: true, Truncated: true}},
		{name: "no reason phrase", raw: "HTTP/1.1 404\r\nContent-Length: 0\r\n\r\n", want: Response{HeadBytes: 35, Status: 404}},
		{name: "status below 100", raw: "HTTP/1.1 099 X\r\n\r\n", reason: ReasonResponse},
		{name: "not HTTP", raw: "SSH-2.0-OpenSSH_9.2\r\n\r\n", reason: ReasonResponse},
		{name: "a version of its own", raw: "HTTP/2.0 200 OK\r\n\r\n", reason: ReasonVersion},
		{name: "conflicting lengths", raw: okReply + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n", reason: ReasonResponse},
		{name: "empty", raw: "", reason: ReasonIncomplete},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			method := tt.method
			if method == "" {
				method = http.MethodPost
			}
			got, err := ParseResponse([]byte(tt.raw), method)
			if tt.reason != "" {
				require.Error(t, err)
				assert.Equal(t, tt.reason, Reason(err))
				return
			}
			require.NoError(t, err)
			assert.Equal(t, tt.want, got)
		})
	}
}

func TestGenAIOperation(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/chat/completions":                     "chat",
		"/v1/chat/completions/":                    "chat",
		"/gateway/llm/v1/chat/completions":         "chat",
		"/openai/deployments/gpt/chat/completions": "chat",
		"/v1/responses":                            "chat",
		"/v1/messages":                             "chat",
		"/api/chat":                                "chat",
		"/v1/completions":                          "text_completion",
		"/completion":                              "text_completion",
		"/ollama/api/generate":                     "text_completion",
		"/generate":                                "text_completion",
		"/generate_stream":                         "text_completion",
		"/v1/embeddings":                           "embeddings",
		"/api/embed":                               "embeddings",
		"/v2/models/llama/infer":                   "generate_content",
		"/v2/models/llama/versions/1/infer":        "generate_content",
		"/triton/v2/models/llama/generate_stream":  "generate_content",
		"/v2/models/llama/versions/1/stats":        "",
		"/v2/models//a/b/infer":                    "",
		"/report/generate":                         "",
		"/v1/models":                               "",
		"/v1/chat/completions/abc":                 "",
		"/xv1/embeddings":                          "",
		"/":                                        "",
		"":                                         "",
		"*":                                        "",
		"/metrics":                                 "",
		"/auto/completion":                         "",
		"/v1/chat/completions-old":                 "",
		"/v2/models/" + strings.Repeat("a/", 100_000): "",
	} {
		assert.Equal(t, want, GenAIOperation(path), "%.80s", path)
		assert.Equal(t, want != "", IsLLMPath(path))
	}
}

func BenchmarkParseRequest(b *testing.B) {
	raw := []byte(okHead + "traceparent: " + parent + "\r\nUser-Agent: bench\r\nAccept: */*\r\nContent-Type: application/json\r\nContent-Length: 512\r\n\r\n")
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := ParseRequest(raw); err != nil {
			b.Fatal(err)
		}
	}
}

func TestTheBufferHoldsNothingOfWhatWentThroughIt(t *testing.T) {
	r := newReader([]byte("GET /secret HTTP/1.1\r\n\r\n"))
	_, err := r.ReadString('\n')
	require.NoError(t, err)
	buffer, err := r.Peek(2) // of the same memory
	require.NoError(t, err)
	whole := unsafe.Slice(unsafe.SliceData(buffer), cap(buffer))
	r.wipe()
	assert.Equal(t, make([]byte, len(whole)), whole)
	before := unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(buffer)), -len("GET /secret HTTP/1.1\r\n"))), len(zeros))
	assert.Equal(t, make([]byte, len(zeros)), before)
}
