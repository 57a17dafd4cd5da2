import java.io.InputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.security.SecureRandom;
import java.util.Random;
import java.util.StringJoiner;
import java.util.UUID;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.Supplier;

/** A process that lives through a fork and draws from the generators that Java has. It prepares all of them first. */
public class Worker {
    static final Random random = new Random();
    static SecureRandom drbg;
    static SecureRandom sha1;
    static SecureRandom nativeRandom;

    static String many(String name, Supplier<Object> next) {
        StringJoiner s = new StringJoiner(" ", "\"" + name + "\":\"", "\"");
        for (int i = 0; i < 64; i++) s.add(String.valueOf(next.get()));
        return s.toString();
    }

    static String draw() {
        return "{" + String.join(",",
            many("Random", random::nextLong),
            many("Math.random", Math::random),
            many("ThreadLocalRandom", () -> ThreadLocalRandom.current().nextLong()),
            many("SecureRandom DRBG", drbg::nextLong),
            many("SecureRandom SHA1PRNG", sha1::nextLong),
            many("SecureRandom NativePRNG", nativeRandom::nextLong),
            many("UUID.randomUUID", UUID::randomUUID)) + "}\n";
    }

    public static void main(String[] args) throws Exception {
        drbg = SecureRandom.getInstance("DRBG");
        sha1 = SecureRandom.getInstance("SHA1PRNG");
        nativeRandom = SecureRandom.getInstance("NativePRNG");
        draw();
        try (ServerSocket server = new ServerSocket(Integer.parseInt(args[0]), 10, InetAddress.getLoopbackAddress())) {
            while (true) {
                try (Socket c = server.accept()) {
                    InputStream in = c.getInputStream();
                    in.read(new byte[100]);
                    c.getOutputStream().write(draw().getBytes(StandardCharsets.UTF_8));
                }
            }
        }
    }
}
