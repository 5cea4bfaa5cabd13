// Package httphead turns the header bytes of an HTTP/1.x message, as the kernel
// side copied them, into the few fields that may leave the receiver.
//
// The bytes are a stranger's: they are cut at their blank line, bounded, and
// parsed by net/http, so that header case, folded white space and conflicting
// lengths are judged as a real server judges them. Everything that is not a
// field of Head, Framing or Response is forgotten here.
package httphead

import (
	"bufio"
	"bytes"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
	"unicode/utf8"
)

// Bounds of what is read and of what is exported, in bytes.
const (
	MaxHead       = 64 << 10 // longest head that is parsed
	MaxPath       = 256      // a longer path is cut
	MaxHost       = 255      // the longest DNS name; a longer host is dropped
	MaxTraceState = 512      // a longer tracestate is dropped whole, as half of one is wrong
)

// Head is what leaves the parser of a request's header bytes: the fields that
// may be exported, and nothing else.
type Head struct {
	Method      string // known method or "_OTHER"
	Path        string // without query, percent-encoded, at most MaxPath bytes
	Host        string // without port
	Proto       string // "1.0" or "1.1"
	TraceParent string // "" if absent or not valid
	TraceState  string // joined per W3C; "" without a valid traceparent
	TraceID     [16]byte
	ParentID    [8]byte
	TraceFlags  byte // the sampled (0x01) and random (0x02) flags; others are unknown and left out

	// ContextProblem says why trace context on the wire was not used: one of the
	// Problem constants, "" if there was none or all of it was used.
	ContextProblem string
}

// Linked tells whether the request carried a valid traceparent.
func (h *Head) Linked() bool { return h.TraceParent != "" }

// Framing is what a request says about its own extent on the connection.
type Framing struct {
	HeadBytes     int   // length of the head, blank line and leading empty lines included
	ContentLength int64 // bytes of body that follow; 0 without a body, -1 if chunked or unknown
	Chunked       bool
	Expect100     bool // waits for a 100 (Continue) before its body
	Close         bool // the connection ends after the response
	Truncated     bool // no blank line in the bytes: later headers were not seen
}

// Response is what a response's head says about its extent and its kind.
type Response struct {
	HeadBytes     int
	Status        int
	ContentLength int64 // bytes of body that follow; 0 if there can be none (HEAD, 1xx, 204, 304), -1 if chunked or until close
	Chunked       bool
	Close         bool // the connection ends after this response
	EventStream   bool // content type of a stream of events: text/event-stream, ndjson and kin
	Informational bool // 1xx other than 101: the final response is still to come
	Upgrade       bool // 101, or 2xx to CONNECT: what follows is not HTTP/1
	Truncated     bool // no blank line in the bytes: later headers were not seen
}

// Reasons for which bytes are not a message, as counted by the receiver.
const (
	ReasonTooLong    = "head_too_long" // no blank line within MaxHead
	ReasonIncomplete = "head_incomplete"
	ReasonHTTP2      = "http2" // the HTTP/2 connection preface
	ReasonVersion    = "http_version"
	ReasonRequest    = "request_malformed"
	ReasonResponse   = "response_malformed"
)

// Error says why bytes are no message that can be read. It never quotes them.
type Error struct {
	Reason string // one of the Reason constants
	Err    error
}

func (e *Error) Error() string { return "http head: " + e.Reason }
func (e *Error) Unwrap() error { return e.Err }

// Reason returns the reason of an error of this package for a counter.
func Reason(err error) string {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.Reason
	}
	return "unknown"
}

var methods = map[string]bool{
	http.MethodGet: true, http.MethodHead: true, http.MethodPost: true, http.MethodPut: true,
	http.MethodPatch: true, http.MethodDelete: true, http.MethodConnect: true,
	http.MethodOptions: true, http.MethodTrace: true, "QUERY": true,
}

// ParseRequest reads the head at the start of b; what follows the blank line is
// not looked at. Without a blank line the complete lines count and the Framing
// is marked Truncated. A broken trace context never makes an error: the request
// is then simply not linked, and Head.ContextProblem says why.
func ParseRequest(b []byte) (Head, Framing, error) {
	head, n, truncated, err := cut(b)
	if err != nil {
		return Head{}, Framing{}, err
	}
	in := newReader(head)
	defer in.wipe()
	r, err := http.ReadRequest(in.Reader)
	if err != nil {
		return Head{}, Framing{}, &Error{ReasonRequest, err}
	}
	if r.ProtoMajor == 2 {
		return Head{}, Framing{}, &Error{Reason: ReasonHTTP2}
	}
	if r.ProtoMajor != 1 || r.ProtoMinor > 1 {
		return Head{}, Framing{}, &Error{Reason: ReasonVersion}
	}
	h := Head{
		Method: r.Method,
		Path:   path(r),
		Host:   host(r.Host),
		Proto:  [...]string{"1.0", "1.1"}[r.ProtoMinor],
	}
	if !methods[h.Method] {
		h.Method = "_OTHER"
	}
	h.readContext(r.Header)
	f := Framing{
		HeadBytes:     n,
		ContentLength: r.ContentLength,
		Chunked:       chunked(r.TransferEncoding),
		Expect100:     strings.EqualFold(r.Header.Get("Expect"), "100-continue"),
		Close:         r.Close,
		Truncated:     truncated,
	}
	if truncated && f.ContentLength == 0 {
		f.ContentLength = -1
	}
	return h, f, nil
}

// ParseResponse reads the head at the start of b of a response to a request
// with the given method, which decides whether a body can follow.
func ParseResponse(b []byte, method string) (Response, error) {
	head, n, truncated, err := cut(b)
	if err != nil {
		return Response{}, err
	}
	in := newReader(head)
	defer in.wipe()
	//nolint:bodyclose // there is no connection behind it, and the body is not read
	r, err := http.ReadResponse(in.Reader, &http.Request{Method: method})
	if err != nil {
		return Response{}, &Error{ReasonResponse, err}
	}
	if r.ProtoMajor != 1 {
		return Response{}, &Error{Reason: ReasonVersion}
	}
	if r.StatusCode < 100 {
		return Response{}, &Error{Reason: ReasonResponse}
	}
	res := Response{
		HeadBytes:     n,
		Status:        r.StatusCode,
		ContentLength: r.ContentLength,
		Chunked:       chunked(r.TransferEncoding),
		Close:         r.Close,
		EventStream:   eventStream(r.Header.Get("Content-Type")),
		Truncated:     truncated,
	}
	res.Upgrade = res.Status == http.StatusSwitchingProtocols ||
		method == http.MethodConnect && res.Status/100 == 2
	res.Informational = res.Status/100 == 1 && !res.Upgrade
	switch {
	case res.Upgrade:
		res.ContentLength = -1
	case method == http.MethodHead, res.Informational, res.Status == http.StatusNoContent,
		res.Status == http.StatusNotModified:
		res.ContentLength, res.Chunked = 0, false
	case truncated && res.ContentLength == 0:
		res.ContentLength = -1
	}
	return res, nil
}

// reader reads header bytes through a buffer of net/http's kind, which is used
// again and holds none of them afterwards.
type reader struct {
	*bufio.Reader
	bytes bytes.Reader
}

var readers = sync.Pool{New: func() any {
	return &reader{Reader: bufio.NewReaderSize(nil, 512)}
}}

func newReader(head []byte) *reader {
	r := readers.Get().(*reader)
	r.bytes.Reset(head)
	r.Reset(&r.bytes)
	return r
}

// zeros are as long as the buffer.
var zeros [512]byte

// wipe overwrites the buffer and gives it back.
func (r *reader) wipe() {
	r.bytes.Reset(zeros[:])
	r.Reset(&r.bytes)
	_, _ = r.Peek(len(zeros)) // fills all of it: there are as many zeros
	r.bytes.Reset(nil)
	r.Reset(&r.bytes)
	readers.Put(r)
}

// cut returns the head at the start of b, ended by a blank line, and its length
// in b. Empty lines before the start line are passed over, as RFC 9112, section
// 2.2 asks of servers. A head that does not end in b is cut after its last
// complete line and given its blank line.
func cut(b []byte) (head []byte, n int, truncated bool, err error) {
	start := 0
	for start < len(b) && start < 8 && (b[start] == '\r' || b[start] == '\n') {
		start++
	}
	rest := b[start:min(len(b), start+MaxHead)]
	last := 0 // end of the last complete line
	for last < len(rest) {
		i := bytes.IndexByte(rest[last:], '\n')
		if i < 0 {
			break
		}
		line := rest[last : last+i]
		last += i + 1
		if len(line) == 0 || len(line) == 1 && line[0] == '\r' {
			return rest[:last], start + last, false, nil
		}
	}
	if len(rest) == MaxHead {
		return nil, 0, false, &Error{Reason: ReasonTooLong}
	}
	if last == 0 {
		return nil, 0, false, &Error{Reason: ReasonIncomplete}
	}
	head = append(append(make([]byte, 0, last+2), rest[:last]...), '\r', '\n')
	return head, len(b), true, nil
}

// path returns the request target's path, percent-encoded, without the query.
func path(r *http.Request) string {
	if r.Method == http.MethodConnect && !strings.HasPrefix(r.RequestURI, "/") {
		return "" // the target is host:port
	}
	p := r.URL.EscapedPath()
	if len(p) > MaxPath {
		p = p[:MaxPath]
	}
	return printable(p)
}

// host returns the host without its port, or "" if it cannot be one.
func host(s string) string {
	if h, _, err := net.SplitHostPort(s); err == nil {
		s = h
	}
	s = strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
	if len(s) > MaxHost || printable(s) != s {
		return ""
	}
	return s
}

// printable returns s if it is ASCII without control characters, else s without
// the bytes that are not.
func printable(s string) string {
	ok := func(c rune) bool { return c > ' ' && c < utf8.RuneSelf && c != 0x7f }
	return strings.Map(func(c rune) rune {
		if ok(c) {
			return c
		}
		return -1
	}, s)
}

func chunked(encodings []string) bool {
	return len(encodings) > 0 && encodings[len(encodings)-1] == "chunked"
}

// eventStream tells whether a content type is one that servers use to send a
// response piece by piece.
func eventStream(contentType string) bool {
	t, _, _ := strings.Cut(contentType, ";")
	switch strings.ToLower(strings.TrimSpace(t)) {
	case "text/event-stream", "application/x-ndjson", "application/ndjson", "application/jsonl",
		"application/x-jsonlines", "application/jsonlines", "application/stream+json":
		return true
	}
	return false
}
