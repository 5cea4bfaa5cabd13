package spikesamplingprocessor

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestLongValuesAreCutOnlyByChoiceAndSaySo(t *testing.T) {
	prompt := strings.Repeat("Wörter ", 100_000)
	send := func(limit int) *harness {
		h := newHarness(t, func(c *Config) {
			c.MaxAttributeBytes = limit
			c.Policies = []PolicyConfig{{Name: "end", Type: OTTLCondition, OTTLCondition: &OTTLConfig{Span: []string{`IsMatch(attributes["gen_ai.prompt"], "the end$")`}}}}
		})
		td := makeTraces(1, app("a", span{id: 2, kind: server, to: 1, attrs: map[string]any{
			"gen_ai.prompt": prompt + "the end", "short": "x", "raw": []byte(prompt), "n": int64(7),
			"messages": []any{map[string]any{"role": "user", "content": prompt}, "y"},
		}}))
		e := td.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).Events().AppendEmpty()
		e.SetName("choice")
		e.Attributes().PutStr("text", prompt)
		h.send(td)
		h.pass(10 * time.Second)
		return h
	}
	t.Run("by default nothing", func(t *testing.T) {
		s := send(0).kept()[traceID(1)][0]
		assert.Equal(t, prompt+"the end", str(s, "gen_ai.prompt"))
		_, ok := s.Attributes().Get(attrTruncated)
		assert.False(t, ok)
	})
	t.Run("to a bound", func(t *testing.T) {
		h := send(1000)
		require.Len(t, h.kept(), 1, "the condition saw all of it")
		s := h.kept()[traceID(1)][0]
		got := str(s, "gen_ai.prompt")
		assert.True(t, strings.HasPrefix(prompt, got))
		assert.InDelta(t, 1000, len(got), 3)
		assert.True(t, utf8.ValidString(got))
		assert.Equal(t, "x", str(s, "short"))
		v, _ := s.Attributes().Get("messages")
		assert.Equal(t, "user", v.Slice().At(0).Map().AsRaw()["role"])
		assert.Less(t, len(v.AsString()), 1200)
		v, _ = s.Attributes().Get("raw")
		assert.Equal(t, 1000, v.Bytes().Len())
		v, ok := s.Attributes().Get(attrTruncated)
		require.True(t, ok)
		assert.ElementsMatch(t, []any{"gen_ai.prompt: 800007 bytes", "raw: 800000 bytes", "messages: 800000 bytes", "choice.text: 800000 bytes"}, v.Slice().AsRaw())
		assert.Equal(t, map[string]int64{"": 4}, h.sum("attributes_truncated", "reason"))
	})
}
