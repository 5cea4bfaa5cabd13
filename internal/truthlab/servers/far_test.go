//go:build linux

package servers

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"
)

func question(t *testing.T, name string, kind dnsmessage.Type) []byte {
	t.Helper()
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 7, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}},
	}
	b, err := m.Pack()
	require.NoError(t, err)
	return b
}

func TestTheNameServerKnowsOneAddress(t *testing.T) {
	address := [4]byte{198, 18, 0, 1}
	for _, c := range []struct {
		name string
		kind dnsmessage.Type
		slow bool
		want int
	}{
		{"model.example.", dnsmessage.TypeA, false, 1},
		{"model.example.", dnsmessage.TypeAAAA, false, 0},
		{"slow1.example.", dnsmessage.TypeA, true, 1},
	} {
		reply, slow, err := resolve(question(t, c.name, c.kind), address)
		require.NoError(t, err)
		assert.Equal(t, c.slow, slow)
		var m dnsmessage.Message
		require.NoError(t, m.Unpack(reply))
		assert.EqualValues(t, 7, m.ID)
		assert.True(t, m.Response)
		assert.Len(t, m.Questions, 1)
		require.Len(t, m.Answers, c.want, "%s %s", c.name, c.kind)
		for _, a := range m.Answers {
			assert.Equal(t, &dnsmessage.AResource{A: address}, a.Body)
		}
	}
	for _, bad := range [][]byte{nil, {1, 2, 3}, question(t, "model.example.", dnsmessage.TypeA)[:14]} {
		_, _, err := resolve(bad, address)
		assert.Error(t, err)
	}
}
