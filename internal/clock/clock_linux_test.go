package clock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTheSystemClocksAgreeWithGo(t *testing.T) {
	c, err := New(System)
	require.NoError(t, err)
	before := time.Now().UnixNano()
	mono, err := System.Monotonic()
	require.NoError(t, err)
	after := time.Now().UnixNano()
	got := int64(c.Offset().Unix(mono))
	assert.GreaterOrEqual(t, got, before-int64(time.Second))
	assert.LessOrEqual(t, got, after+int64(time.Second))
}
