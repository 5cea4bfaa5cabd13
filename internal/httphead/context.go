package httphead

import (
	"encoding/hex"
	"net/http"
	"strings"
)

// Problems with trace context on the wire. All but the last leave the request
// without a link.
const (
	ProblemRepeated   = "traceparent_repeated"
	ProblemTooLong    = "traceparent_too_long"
	ProblemMalformed  = "traceparent_malformed"
	ProblemVersion    = "traceparent_version" // ff, which is forbidden
	ProblemZero       = "traceparent_zero_id"
	ProblemTraceState = "tracestate_dropped" // too long or malformed; the traceparent stands
)

const (
	parentLen    = 55  // 00-<32 hex>-<16 hex>-<2 hex>
	maxParentLen = 256 // of later versions, which may append fields
)

// readContext fills in the trace context from the headers, as W3C Trace Context
// level 2 defines it.
func (h *Head) readContext(header http.Header) {
	values := header["Traceparent"]
	switch {
	case len(values) == 0:
		return // a tracestate alone is to be discarded
	case len(values) > 1:
		h.ContextProblem = ProblemRepeated
		return
	}
	if h.ContextProblem = h.readTraceParent(values[0]); h.ContextProblem != "" {
		return
	}
	state, ok := joinTraceState(header["Tracestate"])
	if !ok {
		h.ContextProblem = ProblemTraceState
		return
	}
	h.TraceState = state
}

// readTraceParent sets the ids if v is valid, else it returns the problem and
// sets nothing. Versions above 00 are read as far as version 00 goes and may
// have more after another dash.
func (h *Head) readTraceParent(v string) (problem string) {
	if len(v) > maxParentLen {
		return ProblemTooLong
	}
	if len(v) < parentLen || v[2] != '-' || v[35] != '-' || v[52] != '-' {
		return ProblemMalformed
	}
	var version, flags [1]byte
	var trace [16]byte
	var parent [8]byte
	if !lowerHex(version[:], v[:2]) || !lowerHex(trace[:], v[3:35]) ||
		!lowerHex(parent[:], v[36:52]) || !lowerHex(flags[:], v[53:55]) {
		return ProblemMalformed
	}
	switch {
	case version[0] == 0xff:
		return ProblemVersion
	case version[0] == 0 && len(v) != parentLen, len(v) > parentLen && v[parentLen] != '-':
		return ProblemMalformed
	case trace == [16]byte{} || parent == [8]byte{}:
		return ProblemZero
	}
	if printable(v) != v {
		return ProblemMalformed
	}
	h.TraceParent, h.TraceID, h.ParentID, h.TraceFlags = v, trace, parent, flags[0]&0x03
	return ""
}

// lowerHex decodes src, which must be lower-case hexadecimal.
func lowerHex(dst []byte, src string) bool {
	for i := range len(src) {
		if c := src[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	_, err := hex.Decode(dst, []byte(src))
	return err == nil
}

// joinTraceState joins the headers in their order and returns false if the
// whole is longer than MaxTraceState or is no list of members.
func joinTraceState(values []string) (string, bool) {
	total := 0
	for _, v := range values {
		total += len(v) + 1
	}
	if total > MaxTraceState+1 {
		return "", false
	}
	var members []string
	for m := range strings.SplitSeq(strings.Join(values, ","), ",") {
		m = strings.Trim(m, " \t")
		if m == "" {
			continue // empty members are allowed
		}
		key, value, ok := strings.Cut(m, "=")
		if !ok || !validKey(key) || !validValue(value) {
			return "", false
		}
		members = append(members, m)
	}
	if len(members) > 32 {
		return "", false
	}
	return strings.Join(members, ","), true
}

func validKey(s string) bool {
	if s == "" || len(s) > 256 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
		case i > 0 && strings.IndexByte("_-*/@", c) >= 0:
		default:
			return false
		}
	}
	return true
}

func validValue(s string) bool {
	if s == "" || len(s) > 256 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '=' {
			return false
		}
	}
	return true
}
